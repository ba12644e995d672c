"""What a run will hold in device memory, from its config and model shape alone: the table of `--dry-run`.

Weights, optimiser state, gradients, cache and wire are counted tensor by tensor, and what autodiff keeps of a
micro-batch where train.remat says what that is. What the backward of a layer, or of the head, holds besides
is estimated: XLA fuses and reuses. docs/performance.md has the plan beside XLA's and beside what was
measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp

from bridges.api import ParamMeta
from bridges.proof import manifest
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.packing import microbatches_needed
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import param_table
from jaxfp8rl.optim.low_bit import Format, nbytes
from jaxfp8rl.policy.shapes import engine_runs
from jaxfp8rl.precision.recipe import get_recipe
from jaxfp8rl.publish.wire import is_fp8, wire_manifest
from jaxfp8rl.rollout.support import width
from pallas_kernels.attention.api import DTYPES, HEAD_SIZES
from pallas_kernels.logprob.api import MEMORY
from pallas_kernels.quantize import BLOCK

Plan = list[tuple[str, int]]
F32 = 4
LINK_SLOTS = 2 * 2**28  # of bridges.served.links
PART = 512 * 2**20  # of bridges.sources.sent
# the first so many rows are there all the time: masters, moments, policy; and a KL's reference after them
RESIDENT = 3


def memory_plan(cfg: Config, model: ModelConfig) -> Plan:
    """(what, bytes) on one device, the first if there are several: the learner's, then the embedded engine's.
    Raises ConfigError for shapes that FP8 cannot take."""
    metas = wire_manifest(model, engine_runs(cfg, model), cfg.precision.weight_dtype)
    resident, update = _resident(cfg, model), _update(cfg, model)
    learner = [*resident, *update]
    if (crossing := _in_flight(cfg, metas)) > (taken := sum(size for _, size in update)):
        learner.append(("weights on their way to the engine, beyond what an update takes", crossing - taken))
    if cfg.rollout.link in ("cuda_ipc", "nccl"):
        learner.append(("two slots of rollout.link to each engine", LINK_SLOTS * cfg.rollout.engines))
    if cfg.rollout.engine != "jax":  # takes its share of a GPU, whatever it needs
        return learner
    cache = _kv_cache(cfg, model, _compute(cfg))
    return [*learner, ("engine: weights", manifest.nbytes(metas)), ("engine: keys and values", cache)]


def warm_start_plan(cfg: Config, model: ModelConfig) -> Plan:
    """The same of the warm start (jaxfp8rl.training.sft), without the engine. One device makes it by itself,
    and computes without FP8; the weights that it begins with are there until it ends."""
    alone = {
        "train": {"data": 1, "fsdp": 1, "tensor": 1}, "precision": {"recipe": "bf16"},
        "loss": {"kl_coef": 0.0},
        "rollout": {"engine": "jax", "one_copy": False},
    }
    cfg = cfg.model_copy(update={name: getattr(cfg, name).model_copy(update=keys)
                                 for name, keys in alone.items()})
    return [("the weights that it begins with, float32", _kept(model, "float32")), *_resident(cfg, model),
            *_update(cfg, model)]


def _resident(cfg: Config, model: ModelConfig) -> Plan:
    """What stays from update to update."""
    moments, size = _moments(cfg, model)
    shared = lambda size: -(-size // cfg.train.over_weights)
    params, policy = sum(math.prod(e.shape)
                         for e in param_table(model)), shared(_policy(cfg, model, _compute(cfg)))
    return [
        (f"master weights, {cfg.optim.master}, {params / 1e6:,.1f} M parameters",
         shared(_kept(model, cfg.optim.master))),
        (moments, shared(size)),
        (f"policy in {cfg.precision.compute_dtype}, codes and scales where it is FP8", policy),
        *([("reference of loss.kl_coef, as the policy", policy)] if cfg.loss.kl_coef else []),
    ]


def _update(cfg: Config, model: ModelConfig) -> Plan:
    """What an update takes besides."""
    compute, params = _compute(cfg), sum(math.prod(e.shape) for e in param_table(model))
    gradients = -(-(params * F32 + _outer(model) * compute) // cfg.train.over_weights)
    update = [
        ("gradients: a float32 sum, and a micro-batch's own outside the layers", gradients),
        (f'what is kept of a micro-batch, train.remat = "{cfg.train.remat}"',
         _kept_of_layers(cfg, model, compute)),
        ("the backward of a layer, or of the head (estimate)",
         max(_layer(cfg, model, compute), _logits(cfg, model, compute))),
    ]
    if found := width(cfg.rollout, model.vocab_size):
        supports = _rows(cfg) * cfg.train.row_tokens * found * F32
        update.append(("the tokens that each was drawn among, of rollout.top_k and top_p", supports))
    if cfg.train.fsdp > 1:
        gathered = _gathered(model, compute) // cfg.train.tensor
        update.append(("weights gathered of all devices: a layer's, the embedding, the head", gathered))
    return update


def _compute(cfg: Config) -> int:
    """Bytes of a number that is computed with."""
    return jnp.dtype(cfg.precision.compute_dtype).itemsize


def format_plan(plan: Plan, of: str = "memory on the device") -> str:
    """The plan as an aligned table, in MiB."""
    rows = [*plan, ("total", sum(size for _, size in plan))]
    return f"{of}\n" + "\n".join(f"  {size / 2**20:12,.2f} MiB  {what}" for what, size in rows)


def _kept(model: ModelConfig, *formats: Format) -> int:
    """Every parameter once in each format, scales included. They are kept in stacks of layers, which changes
    no size."""
    return sum(nbytes(e.shape, kept_as) for e in param_table(model) for kept_as in formats)


def _moments(cfg: Config, model: ModelConfig) -> tuple[str, int]:
    """With optim.offload what of them is on the device at once: a layer of one parameter, or one that is in
    no layer, read and written."""
    formats = (cfg.optim.first_moment, cfg.optim.second_moment)
    what = f"Adam's two moments, {' and '.join(dict.fromkeys(formats))}"
    if not cfg.optim.offload:
        return what, _kept(model, *formats)
    largest = max(sum(nbytes(e.shape, kept_as) for kept_as in formats) for e in param_table(model))
    return f"{what}: {_kept(model, *formats) / 2**20:,.0f} MiB in pinned host memory, here the largest tensor's", 2 * largest


def _in_flight(cfg: Config, metas: Sequence[ParamMeta]) -> int:
    """Everything, where vLLM reloads and for the embedded engine, which keeps copies; written in place, a
    part, or the largest tensor, of what the policy does not hold as it crosses."""
    if cfg.rollout.engine == "jax" or (cfg.rollout.engine == "vllm" and cfg.rollout.publish == "reload"):
        return manifest.nbytes(metas)
    held = cfg.precision.weight_dtype == cfg.precision.compute_dtype and get_recipe(
        cfg.precision.recipe).forward_fp8
    if held and not cfg.rollout.one_copy:
        return 0
    return min(manifest.nbytes(metas), max(PART, *(manifest.nbytes([meta]) for meta in metas)))


def _gathered(model: ModelConfig, itemsize: int) -> int:
    """At the type they are multiplied in: codes are less."""
    # of no layer, or of the first
    return itemsize * sum(math.prod(e.shape) for e in param_table(model) if not e.layer)


def _outer(model: ModelConfig) -> int:
    """Parameters outside the layers."""
    return sum(math.prod(e.shape) for e in param_table(model) if e.layer is None)


def _rows(cfg: Config) -> int:
    """Of an update, on one device."""
    r, t = cfg.rollout, cfg.train
    samples = r.prompts_per_step // t.updates_per_step * r.samples_per_prompt
    needed = microbatches_needed(samples, cfg.max_model_len, t.row_tokens, t.rows_per_microbatch)
    return needed * t.rows_per_microbatch // t.over_rows


def _tokens(cfg: Config) -> int:
    """Of a micro-batch, on one device."""
    return cfg.train.rows_per_microbatch // cfg.train.over_rows * cfg.train.row_tokens


def _kept_of_layers(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    """Every layer's input, all parts of the residual stream, and what train.remat keeps besides
    (models.transformer.SAVED); with "none" the input of each norm and product, q, k, v and what attention
    keeps. Attention's is its result and a float32 a query by the kernels, else its weights [H, T, T]."""
    heads, kv_heads = _heads(cfg, model)
    queries, keys = heads * model.head_dim, kv_heads * model.head_dim
    scores = heads * (1 if _by_kernels(cfg, model) else cfg.train.row_tokens) * F32
    attention = queries * itemsize + scores
    projections = (queries + 2 * keys + model.hidden_size) * itemsize
    kept = {"layer": 0, "products": attention, "mlp": attention + projections,
            "none": attention + projections}[cfg.train.remat]
    mlps = sum(2 * model.hidden_size + copies * (model.hidden_size + 3 * width)
               for copies, width in _mlps(cfg, model)) * itemsize
    stream = model.hidden_size * itemsize * (2 if _fused(cfg) else 1)
    return _tokens(cfg) * (model.num_hidden_layers * (stream + kept)
                           + (mlps if cfg.train.remat == "none" else 0))


def _heads(cfg: Config, model: ModelConfig) -> tuple[int, int]:
    """Of queries, of keys and values: a device's."""
    return model.num_attention_heads // cfg.train.tensor, -(-model.num_key_value_heads // cfg.train.tensor)


def _mlps(cfg: Config, model: ModelConfig) -> list[tuple[int, int]]:
    """(copies of a token, width of the MLP that each goes through) of every layer, a device's: it has room
    for all copies."""
    width = model.intermediate_size // cfg.train.tensor
    of_experts = lambda e: (e.num_experts_per_tok, e.moe_intermediate_size)
    return [of_experts(model.mixture) if sparse else (1, width) for sparse in model.sparse_layers]


def _fused(cfg: Config) -> bool:
    """Whether the stream between layers has two parts (models.layers.UnfusedResidual), beside a compiled
    engine."""
    return cfg.rollout.engine != "jax" and not cfg.rollout.enforce_eager


def _layer(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    """What is computed again of one layer, and the gradients of its MLP."""
    heads = 2 * sum(_heads(cfg, model)) * model.head_dim
    mlp = max(2 * (copies - 1) * model.hidden_size + 6 * copies * width
              for copies, width in _mlps(cfg, model))
    return _tokens(cfg) * (4 * model.hidden_size + heads + mlp) * itemsize


def _policy(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    """Codes take a byte, unless they are the engine's, and their scales 4 for 128x128."""
    forward_fp8 = get_recipe(cfg.precision.recipe).forward_fp8
    runs = engine_runs(cfg, model) if forward_fp8 else ()
    fp8 = sum(math.prod(e.shape) for e in param_table(model) if is_fp8(e, runs))
    params = sum(math.prod(e.shape) for e in param_table(model))
    return (params - fp8) * itemsize + fp8 * (not cfg.rollout.one_copy) + fp8 * F32 // BLOCK**2


def _logits(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    tokens, words = _tokens(cfg), model.vocab_size // cfg.train.tensor
    return min(tokens * words * (F32 + itemsize), MEMORY) + tokens * model.hidden_size * (F32 + itemsize)


def _kv_cache(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    rows = min(cfg.rollout.max_num_seqs, cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt)
    itemsize = 1 if cfg.rollout.kv_cache == "fp8" else itemsize
    return 2 * model.num_hidden_layers * rows * cfg.max_model_len * model.num_key_value_heads * model.head_dim * itemsize


def _by_kernels(cfg: Config, model: ModelConfig) -> bool:
    """Whether attention is, on the GPU that the plan is for: a plan is made on any machine."""
    fits = model.head_dim in HEAD_SIZES and cfg.precision.compute_dtype in DTYPES
    return cfg.precision.attention == "pallas" or (cfg.precision.attention == "auto" and fits)
