"""Which part of a tensor each rank of vLLM holds, by the class of its module."""

from __future__ import annotations

import types

import pytest

from bridges.api import BridgeError, ParamMeta
from bridges.inside_vllm.params import Place
from bridges.inside_vllm.shards import shard_of


def place_of(kind: str, shape: tuple[int, ...], leaf: str = "weight", start: int = 0, **attributes) -> Place:
    module = type(kind, (), attributes)()
    role = "block_scale" if leaf.endswith("inv") else "weight"
    block = (128, 128) if role != "weight" or attributes.get("fp8") else None
    return Place(ParamMeta(f"x.{leaf}", "float32", shape, role, block), "x", module, leaf, start, shape)


def tp(rank: int, ranks: int = 2, **more):
    return {"tp_rank": rank, "tp_size": ranks} | more


EXPERT = {"moe_config": types.SimpleNamespace(tp_rank=1,
                                              moe_parallel_config=types.SimpleNamespace(use_ep=False))}


@pytest.mark.parametrize(
    "place, ranks, whole, cut",
    [
        (place_of("ColumnParallelLinear", (8, 4), **tp(1)), 2, (16, 4), ((8, 16), (0, 4))),
        (place_of("MergedColumnParallelLinear", (8,), "bias", 8, **tp(1)), 2, (16,), ((8, 16),)),
        (place_of("RowParallelLinear", (8, 4), **tp(1)), 2, (8, 8), ((0, 8), (4, 8))),
        (place_of("RowParallelLinear", (8,), "bias", **tp(1)), 2, (8,), ((0, 8),)),
        (place_of("RowParallelLinear", (2, 1), "weight_scale_inv", **tp(1)), 2, (2, 2), ((0, 2), (1, 2))),
        (place_of("RowParallelLinear", (8, 4), **tp(0, 1)), 2, (8, 4), ((0, 8), (0, 4))),
        (place_of("QKVParallelLinear", (8, 4), **tp(3, 4, num_kv_head_replicas=2)), 4, (32, 4),
         ((24, 32), (0, 4))),
        (place_of("QKVParallelLinear", (8, 4), start=8, **tp(3, 4, num_kv_head_replicas=2)), 4, (16, 4),
         ((8, 16), (0, 4))),
        (place_of("ParallelLMHead", (44, 4), org_vocab_size=300,
                  shard_indices=types.SimpleNamespace(org_vocab_start_index=256)), 2, (300, 4),
         ((256, 300), (0, 4))),
        (place_of("RoutedExperts", (8, 4), "w13_weight", **EXPERT), 2, (16, 4), ((8, 16), (0, 4))),
        (place_of("RoutedExperts", (8, 4), "w2_weight", **EXPERT), 2, (8, 8), ((0, 8), (4, 8))),
        (place_of("RMSNorm", (8,)), 2, (8,), ((0, 8),)),
        (place_of("Attention", ()), 2, (), ()),
        (place_of("Mystery", (8, 4)), 1, (8, 4), ((0, 8), (0, 4))),
    ])
def test_ranks_hold_what_vllm_s_loaders_would_give_them(place, ranks, whole, cut):
    shard = shard_of(place, ranks)
    assert (shard.meta.shape, shard.cut) == (whole, cut)


@pytest.mark.parametrize(
    "place, says",
    [
        (place_of("Mystery", (8, 4)), "not known here how Mystery divides its weights among 2 ranks"),
        (place_of("RowParallelLinear", (8, 4), **tp(1, 4)), "divided among 4 ranks, the engine has 2"),
        (place_of("ColumnParallelLinear", (64, 128), fp8=True, **tp(1)),
         r"rows \[64, 128\) of 128, which cuts through an FP8 block of 128"),
        (place_of("RowParallelLinear", (128, 192), fp8=True, **tp(0)), r"columns \[0, 192\) of 384"),
        (place_of("RoutedExperts", (8, 4), "w2_weight", moe_config=types.SimpleNamespace(
            moe_parallel_config=types.SimpleNamespace(use_ep=True))), "with expert parallelism"),
    ])
def test_parts_that_are_not_known_are_refused_by_name(place, says):
    with pytest.raises(BridgeError, match=f"x.weight.*{says}|x.w2_weight.*{says}"):
        shard_of(place, 2)
