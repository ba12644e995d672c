"""How many cells run at once, and on which device each of them runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from jaxfp8rl.config.schema import Config
from jaxfp8rl.gpus import Gpu
from jaxfp8rl.memory.fit import needs
from jaxfp8rl.policy.shapes import model_config

CONTEXT = 2**30  # bytes of a process on a GPU beside its plan: the CUDA context and workspaces
SHARE = 0.94  # of a GPU's memory that cells may plan with
GAPS = 1.1  # what JAX's own allocator takes for a plan of 1: its free pieces are not all of use


class Slot(NamedTuple):
    """A place for a cell. gpu: the name of its GPU; "" for the CPU. share: the part of the GPU's memory that
    JAX's own allocator may take there, 0 to 1; 0 on a CPU."""

    gpu: str = ""
    share: float = 0.0


def slots(cfgs: Sequence[Config], found: Sequence[Gpu], jobs: int | None = None) -> list[Slot]:
    """The places for cells. On each GPU there are as many as the plans of the largest of `cfgs` fit in, and
    `jobs` at most; on a CPU there are `jobs`. By default a place has two cores, also on a GPU, where a cell's
    Python is as busy.

    JAX's own allocator has its share in one piece: growing by itself it would reserve up to twice what a cell
    needs, and leave the last cells too little.
    """
    jobs = jobs or max(1, len(os.sched_getaffinity(0)) // (2 * max(len(found), 1)))
    if not found:
        return [Slot()] * jobs
    counts = {gpu: min(fitting(cfgs, gpu.total), jobs) for gpu in found}
    return [Slot(gpu.name, SHARE / counts[gpu] - CONTEXT / gpu.total)
            for place in range(max(counts.values())) for gpu in found if place < counts[gpu]]


def fitting(cfgs: Sequence[Config], total: int) -> int:
    """How many of `cfgs` fit on a GPU of `total` bytes at once; at least one, which is checked when it
    starts."""
    largest = max(_need(cfg, total) for cfg in _different(cfgs))
    return max(1, int(SHARE * total) // (largest + CONTEXT))


def _need(cfg: Config, total: int) -> int:
    need = max(needs(cfg, model_config(cfg), total).values())
    return int(GAPS * need) if cfg.rollout.engine == "jax" else need


def _different(cfgs: Sequence[Config]) -> list[Config]:
    """`cfgs` that differ in more than their run section."""
    return list({repr([part for name, part in cfg if name != "run"]): cfg for cfg in cfgs}.values())
