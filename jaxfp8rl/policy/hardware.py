"""Choose the kernels of `precision` that this machine has hardware for, and describe the choice to the
user."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models import few_rows
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.transformer import decodes_by_kernel
from jaxfp8rl.precision.records import AttentionBackend, Gradients, Precision, Products
from pallas_kernels.attention.api import DTYPES, HEAD_SIZES
from pallas_kernels.grouped_matmul import high
from pallas_kernels.logprob import api as logprob
from pallas_kernels.logprob import parts as logprob_parts
from pallas_kernels.plgpu_compat import HOPPER, device

FP8_TENSOR_CORES = 8.9  # the first compute capability that has them


def products_of(choice: str, compute_dtype: str) -> Products:
    """Resolve `precision.products` on this machine.

    "auto" is "pallas" on a Hopper GPU, else "tensor_core" on a GPU with FP8 tensor cores, which gives the
    same bits, else "float32". Raises ConfigError if this machine lacks the hardware for the choice, or for
    the reasons of `check_kernels`.
    """
    capability = _capability()
    runs = {
        "pallas": capability == HOPPER and compute_dtype != "float16",
        "tensor_core": float(capability) >= FP8_TENSOR_CORES,
        "float32": True,
    }
    if choice == "auto":
        return Products(next(name for name, here in runs.items() if here))
    _check_products(choice, compute_dtype)
    if not runs[choice]:
        needed = {"pallas": f"a Hopper GPU (capability {HOPPER})",
                  "tensor_core": "a GPU with FP8 tensor cores"}[choice]
        raise ConfigError(f'precision.products = "{choice}" needs {needed}; this is {_name()}',
                          'set precision.products = "auto", which gives the same products on this device')
    return Products(choice)


def attention_of(choice: str, compute_dtype: str, model: ModelConfig) -> AttentionBackend:
    """Resolve `precision.attention` on this machine: "auto" is "pallas" if the kernels support the model and
    the device, else "xla".

    Raises ConfigError for "pallas" if they do not.
    """
    problem = _no_attention(compute_dtype, model) or _no_hopper()
    _refuse_attention(choice, problem)
    if choice != "auto":
        return AttentionBackend(choice)
    return AttentionBackend.XLA if problem else AttentionBackend.PALLAS


def check_exact(cfg: Config, precision: Precision, model: ModelConfig) -> None:
    """Raise ConfigError where precision.exact = "engine" has no kernels on this GPU. On a CPU there are
    references of all."""
    if not precision.exact or device().platform != "gpu":
        return
    counts = {"rollout.max_num_seqs": cfg.rollout.max_num_seqs,
              "train.rows_per_microbatch * train.row_tokens": cfg.train.rows_per_microbatch
              * cfg.train.row_tokens}
    for name, rows in counts.items():
        if rows % 8:
            raise ConfigError(f'precision.exact = "engine": {name} = {rows}',
                              "its kernels take multiples of 8")
    reasons = [few_rows.why_not(model, precision, run, 8) for run in precision.runs]
    head = logprob_parts.why_reference(jnp.dtype(precision.compute_dtype), model.hidden_size,
                                       model.vocab_size)
    reasons += ["" if decodes_by_kernel(model, precision) else "attention without kernels",
                head and f"the head {head}"]
    if why := next(filter(None, reasons), ""):
        raise ConfigError(
            f'precision.exact = "engine" has kernels for dense layers in FP8, and here there is '
            f'another: {why}',
            'set precision.exact = "off": the correction weighs what differs (docs/engine.md)')


def check_kernels(products: str, attention: str, compute_dtype: str, model: ModelConfig) -> None:
    """Raise ConfigError for kernels that support this model or dtype on no machine. No device is queried."""
    _check_products(products, compute_dtype)
    _refuse_attention(attention, _no_attention(compute_dtype, model))


def _check_products(choice: str, compute_dtype: str) -> None:
    if choice == "pallas" and compute_dtype == "float16":
        raise ConfigError(
            'precision.products = "pallas" has no results in precision.compute_dtype = "float16"',
            'set precision.products = "auto"')


def _refuse_attention(choice: str, problem: str) -> None:
    if choice == "pallas" and problem:
        raise ConfigError(f'precision.attention = "pallas" {problem}', 'set precision.attention = "auto"')


def _no_attention(compute_dtype: str, model: ModelConfig) -> str:
    """Why the attention kernels do not support the model on any GPU; "" if they do."""
    if compute_dtype not in DTYPES:
        return f'needs {" or ".join(map(str, DTYPES))}, but precision.compute_dtype is "{compute_dtype}"'
    if model.head_dim not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES[:-1])) + f" and {HEAD_SIZES[-1]}"
        return f"supports heads of size {sizes}, but the model's heads have size {model.head_dim}"
    return ""


def _no_hopper() -> str:
    return "" if _capability() == HOPPER else f"needs a Hopper GPU (capability {HOPPER}); this is {_name()}"


def computed_by(precision: Precision, model: ModelConfig, support: bool = False) -> str:
    """The start-up message about the learner's kernels: which of them it uses, and why where it uses a slower
    one. `support`: log-probabilities are normalised over a token's support (rollout.top_k, rollout.top_p)."""
    no_hopper = _no_hopper()  # then no other reason matters
    # the kernel pads any part of a vocabulary, so that the vocabulary's size never rules it out
    logprobs = logprob.why_reference(jnp.dtype(precision.compute_dtype), model.hidden_size, support)
    parts = [
        _by("attention", precision.attention, _no_attention(precision.compute_dtype, model)),
        _by("log-probabilities", "xla" if logprobs or no_hopper else "pallas", logprobs),
    ]
    if precision.any_fp8:
        in_float16 = precision.compute_dtype == "float16"
        why = 'has no results in float16, but precision.compute_dtype is "float16"' if in_float16 else ""
        parts.insert(0, _by("FP8 products", precision.products, why))
    if model.experts:
        parts.append(_experts(precision, model))
    here = f' ("pallas" {no_hopper})' if no_hopper else ""
    kernels, engine_dtype = f"learner: {', '.join(parts)}{here}", precision.rounding.rope_dtype
    if precision.compute_dtype == engine_dtype:
        return kernels
    return (f"{kernels}; the learner computes in {precision.compute_dtype} and does not mirror the rounding "
            f'of the engine, which computes in {engine_dtype} (precision.compute_dtype = "{engine_dtype}")')


def decode_note(cfg: Config, engine: Precision, model: ModelConfig) -> str | None:
    """The note for a run whose embedded engine, which computes as `engine`, has kernels here: which of them
    its layers decode by, and why where these are the slower ones. None for any other run."""
    if cfg.rollout.engine != "jax" or engine.attention != AttentionBackend.PALLAS:
        return None
    if not decodes_by_kernel(model, engine):
        return 'embedded engine: decode attention by "xla" ("pallas" has no FP8 attention)'
    rows = cfg.rollout.rows
    others = {f"{run.start} to {run.stop - 1}": reason for run in engine.runs
              if (reason := few_rows.why_not(model, engine, run, rows))}
    if not others:
        return "embedded engine: all layers decode by the kernels for few rows"
    said = "; ".join(f"{which} ({reason})" for which, reason in others.items())
    return f"embedded engine: layers that decode without the kernels for few rows: {said} (docs/engine.md)"


def _by(operation: str, chosen: str, why: str) -> str:
    return f'{operation} by "{chosen}"' + (
        f' ("pallas" {why})' if why and chosen != "pallas" and not _no_hopper() else "")


def _experts(precision: Precision, model: ModelConfig) -> str:
    """The kernel of the experts' grouped products. Those in high precision use JAX's own kernels."""
    kernels = precision.products == Products.PALLAS
    in_high = not precision.any_fp8 or precision.gradients == Gradients.HIGH or not precision.activations_fp8
    widths = model.hidden_size, model.mixture.moe_intermediate_size
    why = high.why_reference(jnp.dtype(precision.compute_dtype), *widths) if in_high else ""
    why = why or ("" if kernels else f'is for precision.products = "pallas", not "{precision.products}"')
    operation = "experts in high precision" if precision.any_fp8 and kernels and why else "experts"
    return _by(operation, "xla, 128 rows at a time" if why or _no_hopper() else "pallas", why)


def _capability() -> str:
    """The compute capability of the GPU; "0" without a GPU."""
    here = device()
    return str(getattr(here, "compute_capability", 0)) if here.platform == "gpu" else "0"


def _name() -> str:
    """The name of the device. If JAX_PLATFORMS names several platforms, it also says that the first is
    used."""
    platforms = _platforms()
    return device().device_kind + (f", the first of JAX_PLATFORMS = {platforms}" if "," in platforms else "")


def _platforms() -> str:
    return jax.config.jax_platforms or ""
