"""The activations of a micro-batch on one device: the bytes that layers keep for the backward pass, those of
the backward pass of a layer, and those of the head's logits."""

from __future__ import annotations

from jaxfp8rl.config.schema import Config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.recipe import get_recipe
from pallas_kernels.attention.api import DTYPES, HEAD_SIZES
from pallas_kernels.logprob.api import MEMORY

F32 = 4


def kept_of_layers(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    """The bytes that are kept of all layers for the backward pass.

    Every layer keeps its input, with all parts of the residual stream, and the tensors that train.remat names
    (models.transformer.SAVED). Attention keeps its result and a float32 per query with the kernels, and its
    weights [H, T, T] without them.
    """
    heads, kv_heads = _heads(cfg, model)
    queries, keys = heads * model.head_dim, kv_heads * model.head_dim
    scores = heads * (1 if _by_kernels(cfg, model) else cfg.train.row_tokens) * F32
    if cfg.train.remat == "none":
        of_heads = 2 * (queries + keys) * itemsize + _kept_of_rotation(cfg, model, itemsize) + scores
        return _tokens(cfg) * (model.num_hidden_layers * of_heads + _kept_of_mlps(cfg, model, itemsize))
    attention = queries * itemsize + scores
    projections = (queries + 2 * keys + model.hidden_size) * itemsize
    kept = {"layer": 0, "products": attention, "mlp": attention + projections}[cfg.train.remat]
    stream = model.hidden_size * (itemsize + _added(cfg, itemsize))
    return _tokens(cfg) * model.num_hidden_layers * (stream + kept)


def _kept_of_rotation(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    """The bytes that a layer's norms of queries and keys, and their rotation, keep of a token with
    train.remat = "none", read off XLA's program for a Hopper GPU, as are those of `_kept_of_mlps`: whatever
    is computed in float32 is kept in it."""
    if not model.family.qk_norm:
        return 0
    of_number = 3 * F32 if _added(cfg, itemsize) else 2 * F32 + itemsize
    return sum(_heads(cfg, model)) * (model.head_dim * of_number + 2 * F32)


def _kept_of_mlps(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    """The bytes that the MLPs of all layers, the norms and the residual stream keep of a token with
    train.remat = "none"."""
    mirrored, width = _added(cfg, itemsize), model.hidden_size
    plain = 2 * F32 + 5 * itemsize, 3 * F32 + 3 * itemsize  # of a number of the stream, of one of the MLP
    in_float32 = 4 * F32 + 3 * itemsize, 5 * F32 + itemsize
    by_kernels = 2 * F32 + 5 * itemsize, 2 * itemsize  # FP8 with SwiGLU inside
    fused = mirrored and get_recipe(cfg.precision.recipe).forward_fp8 and not cfg.lora.rank
    of_stream, of_mlp = by_kernels if fused else in_float32 if mirrored else plain
    dense = lambda inner: width * of_stream + inner * of_mlp
    sparse = lambda copies, inner: width * (of_stream + F32 + itemsize) + copies * (
        width * (F32 + 2 * itemsize) + inner * (in_float32 if mirrored else plain)[1])
    return sum(sparse(*mlp) if is_sparse else dense(mlp[1])
               for mlp, is_sparse in zip(mlps(cfg, model), model.sparse_layers, strict=True))


def backward_of_layer(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    """The bytes of a layer's recomputed activations and of its MLP's gradients. With adapters an FP8 MLP does
    not take the fused kernels of SwiGLU, and writes four results of its width more (preset_memory.json)."""
    heads, fused = 2 * sum(_heads(cfg, model)) * model.head_dim, get_recipe(cfg.precision.recipe).forward_fp8
    widths = 10 if cfg.lora.rank and fused else 6
    mlp = max(2 * (copies - 1) * model.hidden_size + widths * copies * width
              for copies, width in mlps(cfg, model))
    return _tokens(cfg) * (4 * model.hidden_size + heads + mlp) * itemsize


def logits(cfg: Config, model: ModelConfig, itemsize: int) -> int:
    """The bytes of the head's chunk of logits and of its input's gradient."""
    tokens, words = _tokens(cfg), model.vocab_size // cfg.train.tensor
    return min(tokens * words * (F32 + itemsize), MEMORY) + tokens * model.hidden_size * (F32 + itemsize)


def mlps(cfg: Config, model: ModelConfig) -> list[tuple[int, int]]:
    """(copies of a token, width of the MLP that each copy goes through) of every layer on one device, which
    has room for all copies."""
    width = model.intermediate_size // cfg.train.tensor
    of_experts = lambda e: (e.num_experts_per_tok, e.moe_intermediate_size)
    return [of_experts(model.mixture) if sparse else (1, width) for sparse in model.sparse_layers]


def _heads(cfg: Config, model: ModelConfig) -> tuple[int, int]:
    """The number of query heads and of key-value heads on one device."""
    return model.num_attention_heads // cfg.train.tensor, -(-model.num_key_value_heads // cfg.train.tensor)


def _tokens(cfg: Config) -> int:
    """The number of tokens of a micro-batch on one device."""
    return cfg.train.rows_per_microbatch // cfg.train.over_rows * cfg.train.row_tokens


def _added(cfg: Config, itemsize: int) -> int:
    """The bytes that a number of the residual stream takes in addition between layers, to mirror a compiled
    engine: it has two parts (models.layers.UnfusedResidual), or is in float32. 0 without such an engine."""
    return 0 if cfg.rollout.engine == "jax" or not cfg.rollout.is_compiled else itemsize


def _by_kernels(cfg: Config, model: ModelConfig) -> bool:
    """Whether the Hopper kernels compute attention. The plan is for a GPU, whichever machine makes it."""
    fits = model.head_dim in HEAD_SIZES and cfg.precision.compute_dtype in DTYPES
    return cfg.precision.attention == "pallas" or (cfg.precision.attention == "auto" and fits)
