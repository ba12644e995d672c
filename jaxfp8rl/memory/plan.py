"""A plan of a run's device memory, from its config and the model's shape alone: the table of `--dry-run`.

Weights, optimiser state, gradients, KV cache and published weights are counted tensor by tensor, and so are
the activations that `train.remat` keeps for the backward pass (jaxfp8rl.memory.activations). The temporary
memory of a layer's or the head's backward pass is an estimate, because XLA fuses operations and reuses
buffers.
docs/notebook_performance.md compares the plan with XLA's figures and with measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp

from bridges.api import ParamMeta
from bridges.proof import manifest
from jaxfp8rl.config.schema import Config
from jaxfp8rl.memory.activations import F32, backward_of_layer, kept_of_layers, logits, mlps
from jaxfp8rl.memory.cache_bytes import embedded_cache
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.draft_head import head_shapes
from jaxfp8rl.models.hf_names import is_packed, param_table
from jaxfp8rl.optim.low_bit import Format, nbytes
from jaxfp8rl.policy.adapters import adapter_shapes
from jaxfp8rl.policy.shapes import engine_runs, microbatches_of, teacher_config, teacher_runs
from jaxfp8rl.precision.layer_runs import LayerRun, plain_runs
from jaxfp8rl.precision.recipe import get_recipe
from jaxfp8rl.publish.draft_head import draft_manifest
from jaxfp8rl.publish.wire import is_fp8, wire_manifest
from jaxfp8rl.rollout.support import width
from pallas_kernels.quantize import BLOCK

Plan = list[tuple[str, int]]
LINK_SLOTS = 2 * 2**28  # as in bridges.vllm_plugin.slots
PART = 512 * 2**20  # as in bridges.sources.sent
TOKENS_AT_ONCE = 16384  # vLLM's default on a GPU of 70 GiB or more
DRAFT_COPIES = 4  # masters, two moments, gradients
LOGITS_COPIES = 4  # logits, log-probabilities, what is sorted, what is drawn from
# The plan's first rows, which exist all the time: masters, moments, policy. A KL's reference or teacher
# follows them.
RESIDENT = 3


def memory_plan(cfg: Config, model: ModelConfig) -> Plan:
    """Rows (description, bytes) of the memory on one device, the first if there are several: the learner's
    rows, then the embedded engine's. Raises ConfigError for shapes that FP8 does not support."""
    metas = wire_manifest(model, engine_runs(cfg, model), cfg.precision.weight_dtype)
    if cfg.rollout.speculation == "head":
        metas += draft_manifest(model, cfg.precision.weight_dtype)
    resident, update = _resident(cfg, model), _update(cfg, model)
    learner = [*resident, *update]
    if (crossing := _in_flight(cfg, model, metas)) > (taken := sum(size for _, size in update)):
        learner.append(("weights in transfer to the engine, beyond an update's memory", crossing - taken))
    return learner + _engine(cfg, model, metas)


def evaluation_plan(cfg: Config, model: ModelConfig, masters: Format) -> Plan:
    """The plan of an evaluation (jaxfp8rl.evaluate), which has no optimiser: the learner publishes, and
    scores for the gate; the engine samples. masters: the format in which the weights of a checkpoint are in
    memory."""
    metas = wire_manifest(model, engine_runs(cfg, model), cfg.precision.weight_dtype)
    return [
        _masters(cfg, model, masters), _policy_row(cfg, model), *_teacher_row(cfg),
        ("scoring for the gate, or weights in transfer to the engine (estimate)",
         max(scoring(cfg, model), _in_flight(cfg, model, metas))),
        *_engine(cfg, model, metas),
    ]


def _engine(cfg: Config, model: ModelConfig, metas: Sequence[ParamMeta]) -> Plan:
    """The buffers of a link, and the memory of an embedded engine."""
    link = [("two transfer buffers of rollout.link", LINK_SLOTS)] * (cfg.rollout.link in ("cuda_ipc", "nccl"))
    if cfg.rollout.engine != "jax":  # vLLM takes its share of a GPU, whatever it needs
        return link
    held = manifest.nbytes(_copied(cfg, model, metas)) + (_adapters(cfg, model)
                                                          if cfg.lora.publish == "adapters" else 0)
    drafting = drafting_bytes(cfg, model)
    cache = embedded_cache(cfg, model)
    weights = "engine: weights" if held else "engine: weights, which are the policy's own"
    return [*link, (weights, held), ("engine: keys and values", cache),
            *([("engine that drafts in FP8: weights", drafting)] if drafting else [])]


def _copied(cfg: Config, model: ModelConfig, metas: Sequence[ParamMeta]) -> list[ParamMeta]:
    """The tensors of which the embedded engine holds copies. Of the others it holds the learner's own: those
    that the policy has in the published format (Config.lends_policy), or a base that does not learn."""
    recipe, p = get_recipe(cfg.precision.recipe), cfg.precision
    fp8, floats = recipe.engine_fp8 == recipe.forward_fp8, p.weight_dtype == p.compute_dtype
    if cfg.lora.rank:
        return [] if cfg.lora.publish == "adapters" and fp8 and floats else list(metas)
    own = set() if cfg.rollout.speculation != "head" else {m.name
                                                           for m in draft_manifest(model, p.weight_dtype)}
    return [m for m in metas if not cfg.lends_policy or m.name in own or not (fp8 if m.block else floats)]


def warm_start_plan(cfg: Config, model: ModelConfig) -> Plan:
    """The plan of a warm start (jaxfp8rl.training.warm_start), without the engine. One device runs it alone,
    in FP8 if the learner's forward pass is. The initial weights stay in memory until it ends."""
    recipe = cfg.precision.recipe if cfg.precision.resolve().forward_fp8 else "bf16"
    alone = {
        "train": {"data": 1, "fsdp": 1, "tensor": 1}, "precision": {"recipe": recipe},
        "loss": {"kl_coef": 0.0}, "reference": {"path": ""},
        "rollout": {"engine": "jax", "one_copy": False},
    }
    cfg = cfg.model_copy(update={name: getattr(cfg, name).model_copy(update=keys)
                                 for name, keys in alone.items()})
    return [("initial weights, float32", _kept(cfg, model, "float32")), *_resident(cfg, model),
            *_update(cfg, model)]


def _resident(cfg: Config, model: ModelConfig) -> Plan:
    """The memory that stays from update to update."""
    moments, size = _moments(cfg, model)
    policy = _policy_row(cfg, model)
    reference = _shared(cfg, _adapters(cfg, model)) if cfg.lora.rank else policy[1]
    return [
        _masters(cfg, model, cfg.optim.master), (moments, _shared(cfg, size)), policy,
        *([("reference policy of loss.kl_coef, in the policy's format", reference)] if cfg.keeps_reference
          else []),
        *_teacher_row(cfg),
        *([("draft head: masters, moments and gradients, float32", DRAFT_COPIES * F32 * _draft_head(model))]
          if cfg.rollout.speculation == "head" else []),
    ]


def _masters(cfg: Config, model: ModelConfig, kept_as: Format) -> tuple[str, int]:
    """The row of the master weights in a format."""
    params = f"{_learned(cfg, model) / 1e6:,.1f} M parameters"
    params += f" of adapters of rank {cfg.lora.rank}" if cfg.lora.rank else ""
    return f"master weights, {kept_as}, {params}", _shared(cfg, _kept(cfg, model, kept_as))


def _policy_row(cfg: Config, model: ModelConfig) -> tuple[str, int]:
    return (f"policy in {cfg.precision.compute_dtype}, {_packed_form(model)} weights as codes and scales",
            _shared(cfg, _policy(cfg, model, _compute(cfg))))


def _teacher_row(cfg: Config) -> Plan:
    """The row of a teacher, if there is one."""
    path = cfg.reference.path
    return [(f"teacher of loss.kl_coef, {path}", _shared(cfg, _teacher(cfg)))] if path else []


def _shared(cfg: Config, size: int) -> int:
    """A device's part of what is sharded as the weights are."""
    return -(-size // cfg.train.over_weights)


def drafting_bytes(cfg: Config, model: ModelConfig) -> int:
    """The bytes of the weights of the engine that drafts in FP8 (selection.explore_samples); 0 without one.
    Its cache is free when the other engine has one."""
    if not cfg.selection.explore_samples:
        return 0
    runs = engine_runs(cfg.having("precision", recipe="fp8_rollout"), model)
    return manifest.nbytes(wire_manifest(model, runs, cfg.precision.weight_dtype))


def _draft_head(model: ModelConfig) -> int:
    """The number of weights of a draft head."""
    return sum(map(math.prod, head_shapes(model).values()))


def _update(cfg: Config, model: ModelConfig) -> Plan:
    """The memory that an update takes in addition."""
    compute, params = _compute(cfg), _learned(cfg, model)
    sums = jnp.dtype(cfg.optim.gradient_sums).itemsize
    gradients = -(-(params * sums + (0 if cfg.lora.rank
                                     else _outer(model)) * compute) // cfg.train.over_weights)
    update = [
        (f"gradients: the {cfg.optim.gradient_sums} sums, and one micro-batch's outside the layers",
         gradients),
        (f'activations of a micro-batch, train.remat = "{cfg.train.remat}"',
         kept_of_layers(cfg, model, compute)),
        ("backward pass of a layer, or of the head (estimate)",
         max(backward_of_layer(cfg, model, compute), logits(cfg, model, compute))),
    ]
    if model.packed:
        numbers = sum(math.prod(e.shape) for e in param_table(model) if e.layer == 0 and is_packed(e, model))
        update.append(("decoded weights of a layer (estimate)", numbers * compute))
    if found := width(cfg.rollout, model.vocab_size):
        supports = _rows(cfg) * cfg.train.row_tokens * found * F32
        update.append(("candidate tokens of each sample under rollout.top_k and top_p", supports))
    backward = sum(size for _, size in update[1:])
    if cfg.reference.path and (more := scoring(cfg, teacher_config(cfg)) - backward) > 0:
        update.append(("scoring by the teacher, beyond the backward pass", more))
    if cfg.optim.offload and (more := _moments_on_their_way(cfg, model) - backward) > 0:
        update.append(("moments of a tensor on their way, beyond the backward pass", more))
    if cfg.train.fsdp > 1:
        gathered = _gathered(model, compute) // cfg.train.tensor
        update.append(("weights gathered from all devices: a layer, and the embedding or the head", gathered))
    return update


def _compute(cfg: Config) -> int:
    """The size in bytes of a number of `precision.compute_dtype`."""
    return jnp.dtype(cfg.precision.compute_dtype).itemsize


def format_plan(plan: Plan, of: str = "memory on the device") -> str:
    """The plan as an aligned table, in MiB, under the heading `of`."""
    rows = [*plan, ("total", sum(size for _, size in plan))]
    return f"{of}\n" + "\n".join(f"  {size / 2**20:12,.2f} MiB  {what}" for what, size in rows)


def _kept(cfg: Config, model: ModelConfig, *formats: Format) -> int:
    """The bytes of every parameter that learns in each of the formats, scales included. Parameters are kept
    in stacks of layers, which does not change their size."""
    return sum(nbytes(shape, kept_as) for shape in _learned_shapes(cfg, model) for kept_as in formats)


def _learned_shapes(cfg: Config, model: ModelConfig) -> list[tuple[int, ...]]:
    """The shapes of the tensors that learn: of all, or of the adapters of every layer."""
    if not cfg.lora.rank:
        return [e.shape for e in param_table(model)]
    r, layers = cfg.lora.rank, model.num_hidden_layers
    return [(layers, *shape) for n, k in adapter_shapes(cfg, model).values() for shape in ((r, k), (n, r))]


def _learned(cfg: Config, model: ModelConfig) -> int:
    """The number of parameters that learn."""
    return sum(map(math.prod, _learned_shapes(cfg, model)))


def _adapters(cfg: Config, model: ModelConfig) -> int:
    """The bytes of the adapters in a policy; 0 without any."""
    return _learned(cfg, model) * jnp.dtype(cfg.lora.dtype).itemsize if cfg.lora.rank else 0


def _moments(cfg: Config, model: ModelConfig) -> tuple[str, int]:
    """(description, bytes) of Adam's moments on the device between updates: none of them with
    optim.offload."""
    formats = (cfg.optim.first_moment, cfg.optim.second_moment)
    what = f"Adam's two moments, {' and '.join(dict.fromkeys(formats))}"
    if not cfg.optim.offload:
        return what, _kept(cfg, model, *formats)
    return f"{what}: {moments_on_host(cfg, model) / 2**20:,.0f} MiB in pinned host memory", 0


def moments_on_host(cfg: Config, model: ModelConfig) -> int:
    """The bytes of all of Adam's moments in pinned host memory; 0 without optim.offload."""
    return _kept(cfg, model, cfg.optim.first_moment, cfg.optim.second_moment) if cfg.optim.offload else 0


def _moments_on_their_way(cfg: Config, model: ModelConfig) -> int:
    """The bytes of moments in host memory that an update has on the device at a time: those of one layer of a
    parameter, or of a parameter outside the layers, as they are read and as they are written."""
    formats = (cfg.optim.first_moment, cfg.optim.second_moment)
    if cfg.lora.rank:
        return 2 * max(sum(nbytes(shape[1:], kept_as) for kept_as in formats)
                       for shape in _learned_shapes(cfg, model))
    return 2 * max(sum(nbytes(e.shape, kept_as) for kept_as in formats) for e in param_table(model))


def _in_flight(cfg: Config, model: ModelConfig, metas: Sequence[ParamMeta]) -> int:
    """The bytes that a publish takes on the learner's device. If vLLM reloads its weights, or the embedded
    engine keeps copies, that is all of them. Written in place, it is one part, or the largest tensor, of the
    weights that the policy does not already hold in the published format."""
    if cfg.rollout.engine == "jax":
        return manifest.nbytes(_copied(cfg, model, metas))
    if cfg.rollout.engine == "vllm" and cfg.rollout.publish == "reload":
        return manifest.nbytes(metas)
    held = cfg.precision.weight_dtype == cfg.precision.compute_dtype and get_recipe(
        cfg.precision.recipe).forward_fp8
    # a sum in float32 and its product, of a part at a time
    if cfg.lora.rank and cfg.lora.publish == "merged":
        numbers = [math.prod(meta.shape) for meta in metas]
        return 2 * F32 * min(sum(numbers), max(PART, *numbers))
    if held and not cfg.rollout.one_copy:
        return 0
    return min(manifest.nbytes(metas), max(PART, *(manifest.nbytes([meta]) for meta in metas)))


def _gathered(model: ModelConfig, itemsize: int) -> int:
    """The bytes of a layer, and of the embedding or the head, which are never there at once, in the type that
    they are multiplied in. FP8 codes take less."""
    table = param_table(model)
    outside = max(math.prod(e.shape) for e in table if e.layer is None)
    return itemsize * (outside + sum(math.prod(e.shape) for e in table if e.layer == 0))


def _all(model: ModelConfig) -> int:
    """The number of parameters."""
    return sum(math.prod(e.shape) for e in param_table(model))


def _outer(model: ModelConfig) -> int:
    """The number of parameters outside the layers."""
    return sum(math.prod(e.shape) for e in param_table(model) if e.layer is None)


def _rows(cfg: Config) -> int:
    """The number of rows of an update on one device."""
    return microbatches_of(cfg) * cfg.train.rows_per_microbatch // cfg.train.over_rows


def _policy(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    """The bytes of the policy. An FP8 code takes a byte, unless the engine holds it (one_copy), and a scale 4
    bytes for each 128x128 block. Weights in four bits are counted as they are stored."""
    forward_fp8 = get_recipe(cfg.precision.recipe).forward_fp8
    runs = engine_runs(cfg, model) if forward_fp8 else ()
    dtype = cfg.precision.weight_dtype
    return _weights(model, runs, itemsize, dtype, not cfg.rollout.one_copy) + _adapters(cfg, model)


def _teacher(cfg: Config) -> int:
    """The bytes of the teacher's weights, as its forward pass reads them."""
    teacher = teacher_config(cfg)
    return _weights(teacher, teacher_runs(cfg, teacher), _compute(cfg), cfg.precision.weight_dtype)


def _weights(model: ModelConfig, runs: tuple[LayerRun, ...], itemsize: int, dtype: str,
             kept: bool = True) -> int:
    """The bytes of a model's weights: of its FP8 linears the scales and, if they are `kept`, the codes."""
    fp8 = sum(math.prod(e.shape) for e in param_table(model) if is_fp8(e, runs))
    codes = fp8 * kept + fp8 * F32 // BLOCK**2
    if packed := {e.hf_name for e in param_table(model) if is_packed(e, model)}:
        metas = wire_manifest(model, runs or plain_runs(model.sparse_layers), dtype)
        codes += manifest.nbytes([m for m in metas if m.name.partition(".weight")[0] + ".weight" in packed])
        fp8 += sum(math.prod(e.shape) for e in param_table(model) if e.hf_name in packed)
    return (_all(model) - fp8) * itemsize + codes


def _packed_form(model: ModelConfig) -> str:
    return {"nvfp4": "NVFP4", "mxfp4": "MXFP4", "int4": "INT4"}[model.packed.form] if model.packed else "FP8"


def left_free(cfg: Config, model: ModelConfig) -> int:
    """The bytes that a cache that is "auto" leaves free for what is done while the engine has it. vLLM
    computes; the learner publishes, or scores a micro-batch for the gate and for the first scales of an FP8
    cache. What is computed is estimated."""
    metas = wire_manifest(model, engine_runs(cfg, model), cfg.precision.weight_dtype)
    return _vllm_at_work(cfg, model) + max(scoring(cfg, model), _in_flight(cfg, model, metas))


def _vllm_at_work(cfg: Config, model: ModelConfig) -> int:
    """The bytes that vLLM needs while it computes, beside weights and cache: for the tokens that it takes at
    once, in a layer the residual stream and the results of its products with their FP8 copies; and for each
    sequence its logits, in float32, with what sampling makes of them."""
    width = max(copies * width for copies, width in mlps(cfg, model)) * cfg.train.tensor
    layer = TOKENS_AT_ONCE * (6 * model.hidden_size + 5 * width) * _compute(cfg)
    return layer + cfg.rollout.max_num_seqs * model.vocab_size * F32 * LOGITS_COPIES


def scoring(cfg: Config, model: ModelConfig) -> int:
    """The bytes that a scoring pass takes in addition: half of a layer's backward pass, or the head's chunk
    of logits. XLA needs 0.55 to 0.82 of that for Qwen3-1.7B and 8B (tests/sm90a/test_memory.py)."""
    compute = _compute(cfg)
    gathered = _gathered(model, compute) // cfg.train.tensor if cfg.train.fsdp > 1 else 0
    return gathered + max(backward_of_layer(cfg, model, compute) // 2, logits(cfg, model, compute))
