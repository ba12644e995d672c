"""What of `precision` this machine has hardware for, and what a run says of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.recipe import AttentionBackend, Gradients, Precision, Products
from pallas_kernels.attention.api import DTYPES, HEAD_SIZES
from pallas_kernels.grouped_matmul import high
from pallas_kernels.logprob import api as logprob
from pallas_kernels.plgpu_compat import HOPPER, device

FP8_TENSOR_CORES = 8.9  # the first compute capability that has them


def products_of(choice: str, compute_dtype: str) -> Products:
    """`precision.products` on this machine: "auto" is "pallas" on a Hopper GPU, else "tensor_core" where
    there are FP8 tensor cores, which has the same bits, else "float32".

    Raises ConfigError for a choice that this machine has no hardware for, or as `check_kernels`.
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
                          'set precision.products = "auto": the same products by what is here')
    return Products(choice)


def attention_of(choice: str, compute_dtype: str, model: ModelConfig) -> AttentionBackend:
    """`precision.attention` on this machine: "auto" is "pallas" where the kernels are for the model and run,
    else "xla".

    Raises ConfigError for "pallas" where they are not or do not.
    """
    problem = _no_attention(compute_dtype, model) or _no_hopper()
    _refuse_attention(choice, problem)
    if choice != "auto":
        return AttentionBackend(choice)
    return AttentionBackend.XLA if problem else AttentionBackend.PALLAS


def check_kernels(products: str, attention: str, compute_dtype: str, model: ModelConfig) -> None:
    """Raise ConfigError for kernels that are not for this model or type on any machine. No device is
    asked."""
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
    """Why the attention kernels do not take the model on any GPU; "" where they do."""
    if compute_dtype not in DTYPES:
        return f'takes {" or ".join(map(str, DTYPES))}, precision.compute_dtype is "{compute_dtype}"'
    if model.head_dim not in HEAD_SIZES:
        sizes = ", ".join(map(str, HEAD_SIZES[:-1])) + f" and {HEAD_SIZES[-1]}"
        return f"has heads of {sizes}, the model's are of {model.head_dim}"
    return ""


def _no_hopper() -> str:
    return "" if _capability() == HOPPER else f"needs a Hopper GPU (capability {HOPPER}), this is {_name()}"


def computed_by(precision: Precision, model: ModelConfig, support: bool = False) -> str:
    """What a run says when it starts: by what the learner computes, and where a kernel is left for something
    slower, why. `support`: log-probabilities are over the tokens that a filter has left."""
    # any part of a vocabulary is padded
    logprobs = logprob.why_reference(jnp.dtype(precision.compute_dtype), model.hidden_size, support)
    parts = [
        _by("attention", precision.attention, _no_attention(precision.compute_dtype, model)),
        _by("log-probabilities", "xla" if logprobs or _no_hopper() else "pallas", logprobs),
    ]
    if precision.any_fp8:
        why = 'has no results in float16, precision.compute_dtype is "float16"' if precision.compute_dtype == "float16" else ""
        parts.insert(0, _by("FP8 products", precision.products, why))
    if model.experts:
        parts.append(_experts(precision, model))
    here = f' ("pallas" {_no_hopper()})' if _no_hopper() else ""
    said, engine = f"learner{here}: {', '.join(parts)}", precision.rope_dtype
    if precision.compute_dtype == engine:
        return said
    return f'{said}, in {precision.compute_dtype} where the engine computes in {engine}, whose roundings are then not mirrored ' \
           f'(precision.compute_dtype = "{engine}")'


def _by(what: str, chosen: str, why: str) -> str:
    return f'{what} by "{chosen}"' + (f' ("pallas" {why})' if why and chosen != "pallas" else "")


def _experts(precision: Precision, model: ModelConfig) -> str:
    """Of grouped products those that are not in FP8 have kernels of their own, JAX's."""
    kernels = precision.products == Products.PALLAS
    in_high = not precision.any_fp8 or precision.gradients == Gradients.HIGH or not precision.activations_fp8
    widths = model.hidden_size, model.mixture.moe_intermediate_size
    why = high.why_reference(jnp.dtype(precision.compute_dtype), *widths) if in_high else ""
    why = why or ("" if kernels else f'is for precision.products = "pallas", not "{precision.products}"')
    what = "experts in high precision" if precision.any_fp8 and kernels and why else "experts"
    return _by(what, "xla, 128 rows at a time" if why or _no_hopper() else "pallas", why)


def _capability() -> str:
    """Of the GPU here; "0" where there is none."""
    here = device()
    return str(getattr(here, "compute_capability", 0)) if here.platform == "gpu" else "0"


def _name() -> str:
    """Of the device; and why it is that one, where JAX has been given others behind it."""
    platforms = _platforms()
    return device().device_kind + (f", the first of JAX_PLATFORMS = {platforms}" if "," in platforms else "")


def _platforms() -> str:
    return jax.config.jax_platforms or ""
