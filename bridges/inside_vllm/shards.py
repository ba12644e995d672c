"""Which part of a checkpoint's tensor a rank of tensor parallelism holds, as vLLM's own loaders cut it.

    q, k, v, gate, up      rows; where there are fewer KV heads than ranks, several ranks hold the same
    o, down                columns; their bias whole
    experts                rows of gate and up, columns of down
    embeddings, lm_head    rows of the vocabulary, whose padding is in no checkpoint
    norms, routers, scales of attention    whole

A module that is not listed here is refused by its name once there are several ranks.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from bridges.api import BridgeError, Cut, ParamMeta
from bridges.inside_vllm.params import Place

BY_ROWS = {"ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear"}
BY_COLUMNS = {"RowParallelLinear"}
BY_VOCABULARY = {"VocabParallelEmbedding", "ParallelLMHead"}
EXPERTS = {"RoutedExperts", "FusedMoE"}
WHOLE = {"ReplicatedLinear", "GateLinear", "RMSNorm", "GemmaRMSNorm", "LayerNorm", "Attention"}


class Shard(NamedTuple):
    """`meta`: of the whole tensor. The rank holds `whole[cut]`; a single number has an empty cut."""

    meta: ParamMeta
    cut: Cut


def shard_of(place: Place, ranks: int) -> Shard:
    """The shard of this process's rank. Raises BridgeError, which names the tensor, for a module whose cut is
    not known here, for expert parallelism, and for an FP8 block that two ranks would share."""
    kind = type(place.module).__name__
    if ranks == 1 or kind in WHOLE or not place.meta.shape:
        shard = _whole(place.meta)
    elif kind in BY_VOCABULARY:
        indices = place.module.shard_indices
        shard = _cut(place.meta, 0, indices.org_vocab_start_index, place.module.org_vocab_size)
    elif kind in EXPERTS:
        shard = _of_expert(place, ranks)
    elif kind in BY_ROWS | BY_COLUMNS:
        shard = _of_linear(place, kind, ranks)
    else:
        raise BridgeError(f"{place.meta.name}: it is not known here how {kind} divides its weights among "
                          f"{ranks} ranks", "use --tensor-parallel-size 1")
    _check_blocks(shard)
    return shard


def _of_linear(place: Place, kind: str, ranks: int) -> Shard:
    module, meta = place.module, place.meta
    if module.tp_size == 1:  # vLLM's disable_tp: every rank holds all of it
        return _whole(meta)
    if module.tp_size != ranks:
        raise BridgeError(f"{meta.name} is divided among {module.tp_size} ranks, the engine has {ranks}",
                          "use plain tensor parallelism")
    if kind in BY_COLUMNS:
        return _whole(meta) if len(meta.shape) == 1 else _part(meta, 1, module.tp_rank, ranks)
    copies = module.num_kv_head_replicas if kind == "QKVParallelLinear" and place.start else 1
    return _part(meta, 0, module.tp_rank // copies, ranks // copies)


def _of_expert(place: Place, ranks: int) -> Shard:
    config = place.module.moe_config
    if config.moe_parallel_config.use_ep:
        raise BridgeError(f"{place.meta.name}: with expert parallelism a rank holds some experts only",
                          "leave --enable-expert-parallel out")
    return _part(place.meta, 1 if place.leaf.startswith("w2") else 0, config.tp_rank, ranks)


def _part(meta: ParamMeta, axis: int, index: int, parts: int) -> Shard:
    """Part `index` of equal `parts`, each of the shape that `meta` has."""
    return _cut(meta, axis, index * meta.shape[axis], parts * meta.shape[axis])


def _cut(meta: ParamMeta, axis: int, start: int, size: int) -> Shard:
    """What begins at `start` along `axis` of a tensor that is `size` long there."""
    shape = list(meta.shape)
    cut = [(0, n) for n in shape]
    cut[axis] = start, start + shape[axis]
    shape[axis] = size
    return Shard(dataclasses.replace(meta, shape=tuple(shape)), tuple(cut))


def _whole(meta: ParamMeta) -> Shard:
    return Shard(meta, tuple((0, n) for n in meta.shape))


def _check_blocks(shard: Shard) -> None:
    """An FP8 weight is cut at edges of its blocks, so that each block has its scale on one rank."""
    if shard.meta.block is None or shard.meta.role != "weight":
        return
    for axis, ((start, stop), block) in enumerate(zip(shard.cut, shard.meta.block)):
        size = shard.meta.shape[axis]
        if any(edge % block and edge != size for edge in (start, stop)):
            raise BridgeError(
                f"{shard.meta.name}: a rank holds {('rows', 'columns')[axis]} [{start}, {stop}) of {size}, "
                f"which cuts through an FP8 block of {block}",
                "use fewer ranks, or leave the linear unquantised (high_precision_modules)")
