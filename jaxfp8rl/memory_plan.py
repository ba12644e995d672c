"""What a run will hold in device memory, from its config and model shape alone: the table of `--dry-run`.

Weights, optimiser state, gradients, cache and wire are counted tensor by tensor. What autodiff keeps of a micro-batch is
estimated (XLA fuses and reuses), as is whatever the compiler needs besides: leave a fifth of the memory free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp

from bridges import manifest
from bridges.api import ParamMeta
from jaxfp8rl.build import engine_runs
from jaxfp8rl.config import Config
from jaxfp8rl.low_bit import Format, nbytes
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import param_table
from jaxfp8rl.precision.recipe import get_recipe
from jaxfp8rl.publish import is_fp8, wire_manifest
from pallas_kernels.logprob.api import MEMORY
from pallas_kernels.quantize import BLOCK

Plan = list[tuple[str, int]]
F32 = 4
LINK_SLOTS = 2 * 2**28  # of bridges.weights.links
PART = 160 * 2**20  # of bridges.weights.vllm_inplace


def memory_plan(cfg: Config, model: ModelConfig) -> Plan:
    """(what, bytes) on one device, the first if there are several: the learner's, then the embedded engine's. Raises ConfigError
    for shapes that FP8 cannot take."""
    params = sum(math.prod(e.shape) for e in param_table(model))
    compute = jnp.dtype(cfg.precision.compute_dtype).itemsize
    metas = wire_manifest(model, engine_runs(cfg, model), cfg.precision.weight_dtype)
    wire = manifest.nbytes(metas)
    split = [
        (f"master weights, {cfg.optim.master}, {params / 1e6:,.1f} M parameters", _kept(model, cfg.optim.master)),
        _moments(cfg, model),
        ("gradients: a float32 sum, and a micro-batch's own", params * (F32 + compute)),
        (f"policy in {cfg.precision.compute_dtype}, and codes and scales of what is FP8 in it", _policy(cfg, model, compute)),
    ]  # over train.fsdp devices
    learner = [
        *((what, -(-size // cfg.train.fsdp)) for what, size in split),
        (f"weights on their way to the engine, recipe {cfg.precision.recipe}", _in_flight(cfg, metas)),
        ("activations of a micro-batch (estimate)", _activations(cfg, model, compute)),
        ("logits of a block, their gradient and that of the hidden states (estimate)", _logits(cfg, model, compute)),
    ]
    if cfg.train.fsdp > 1:
        learner.append(("weights gathered of all devices: a layer's, the embedding, the head", _gathered(model, compute)))
    if cfg.rollout.link in ("cuda_ipc", "nccl"):
        learner.append(("two slots of rollout.link", LINK_SLOTS))
    if cfg.rollout.engine != "jax":  # takes its share of a GPU, whatever it needs
        return learner
    return [*learner, ("engine: weights", wire), ("engine: keys and values", _kv_cache(cfg, model, compute))]


def format_plan(plan: Plan) -> str:
    """The plan as an aligned table, in MiB."""
    rows = [*plan, ("total", sum(size for _, size in plan))]
    return "memory on the device\n" + "\n".join(f"  {size / 2**20:12,.2f} MiB  {what}" for what, size in rows)


def _kept(model: ModelConfig, *formats: Format) -> int:
    """Every parameter once in each format, scales included. They are kept in stacks of layers, which changes no size."""
    return sum(nbytes(e.shape, kept_as) for e in param_table(model) for kept_as in formats)


def _moments(cfg: Config, model: ModelConfig) -> tuple[str, int]:
    """With optim.offload what of them is on the device at once: a layer of one parameter, or one that is in no layer, read and
    written."""
    formats = (cfg.optim.first_moment, cfg.optim.second_moment)
    what = f"Adam's two moments, {' and '.join(dict.fromkeys(formats))}"
    if not cfg.optim.offload:
        return what, _kept(model, *formats)
    largest = max(sum(nbytes(e.shape, kept_as) for kept_as in formats) for e in param_table(model))
    return f"{what}: {_kept(model, *formats) / 2**20:,.0f} MiB in pinned host memory, here the largest tensor's", 2 * largest


def _in_flight(cfg: Config, metas: Sequence[ParamMeta]) -> int:
    """Everything, where vLLM reloads and for the embedded engine, which keeps copies; written in place, two parts, or two of the
    largest tensor, of what the policy does not hold as it crosses."""
    if cfg.rollout.engine == "jax" or (cfg.rollout.engine == "vllm" and cfg.rollout.publish == "reload"):
        return manifest.nbytes(metas)
    held = cfg.precision.weight_dtype == cfg.precision.compute_dtype and get_recipe(cfg.precision.recipe).forward_fp8
    if held and not cfg.rollout.one_copy:
        return 0
    return min(manifest.nbytes(metas), 2 * max(PART, *(manifest.nbytes([meta]) for meta in metas)))


def _gathered(model: ModelConfig, itemsize: int) -> int:
    """At the type they are multiplied in: codes are less."""
    return itemsize * sum(math.prod(e.shape) for e in param_table(model) if not e.layer)  # of no layer, or of the first


def _activations(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    """A layer keeps the input of each norm and product, q, k, v and the attention's weights [H, T, T] for its backward pass (by
    the kernels a number a query, [H, T]); with remat only its input, while one layer at a time holds the rest."""
    tokens = cfg.train.rows_per_microbatch // cfg.train.fsdp * cfg.train.row_tokens
    heads = (2 * model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
    scores = model.num_attention_heads * (1 if cfg.precision.attention == "pallas" else cfg.train.row_tokens) * F32
    layer = tokens * ((4 * model.hidden_size + heads + 3 * model.intermediate_size) * itemsize + scores)
    if cfg.train.remat:
        return layer + model.num_hidden_layers * tokens * model.hidden_size * itemsize
    return model.num_hidden_layers * layer


def _policy(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    """Codes take a byte, unless they are the engine's, and their scales 4 for 128x128; beside them stand zeros in the type of
    their gradients."""
    forward_fp8 = get_recipe(cfg.precision.recipe).forward_fp8
    runs = engine_runs(cfg, model) if forward_fp8 else ()
    fp8 = sum(math.prod(e.shape) for e in param_table(model) if is_fp8(e, runs))
    params = sum(math.prod(e.shape) for e in param_table(model))
    return params * itemsize + fp8 * (not cfg.rollout.one_copy) + fp8 * F32 // BLOCK**2


def _logits(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    tokens = cfg.train.rows_per_microbatch // cfg.train.fsdp * cfg.train.row_tokens
    return min(tokens * model.vocab_size * (F32 + itemsize), MEMORY) + tokens * model.hidden_size * (F32 + itemsize)


def _kv_cache(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    rows = min(cfg.rollout.max_num_seqs, cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt)
    itemsize = 1 if cfg.rollout.kv_cache == "fp8" else itemsize
    return 2 * model.num_hidden_layers * rows * cfg.max_model_len * model.num_key_value_heads * model.head_dim * itemsize
