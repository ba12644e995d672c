"""How many cells run at once, and on which device each of them runs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import UserError
from jaxfp8rl.memory.fit import needs
from jaxfp8rl.policy.shapes import model_config

CONTEXT = 2**30  # bytes of a process on a GPU beside its plan: the CUDA context and workspaces
SHARE = 0.94  # of a GPU's memory that cells may plan with


class Gpu(NamedTuple):
    """A GPU that this process may use. name: its index or UUID, as CUDA_VISIBLE_DEVICES has it."""

    name: str
    total: int  # bytes


def gpus() -> list[Gpu]:
    """The GPUs that this process may use; none on a machine without, or with JAX_PLATFORMS=cpu. Raises
    UserError if the driver does not answer. It takes no GPU itself."""
    if os.environ.get("JAX_PLATFORMS") == "cpu" or not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise UserError(f"nvidia-smi: {(done.stderr or done.stdout).strip()}", "repair the NVIDIA driver")
    rows = [line.split(", ") for line in done.stdout.strip().splitlines()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    wanted = [row[0] for row in rows] if visible is None else [name for name in visible.split(",") if name]
    sizes = {name: int(size) * 2**20 for index, uuid, size in rows for name in (index, uuid)}
    return [Gpu(name, sizes[name]) for name in wanted if name in sizes]


def slots(cfgs: Sequence[Config], found: Sequence[Gpu], jobs: int | None = None) -> list[str]:
    """The device of each place for a cell: a GPU's name, or "" for the CPU.

    On each GPU there are as many places as the plans of the largest of `cfgs` fit in, and `jobs` at most; on
    a CPU there are `jobs`. By default a place has two cores, also on a GPU, where a cell's Python is as busy.
    """
    jobs = jobs or max(1, len(os.sched_getaffinity(0)) // (2 * max(len(found), 1)))
    if not found:
        return [""] * jobs
    counts = {gpu: min(fitting(cfgs, gpu.total), jobs) for gpu in found}
    return [gpu.name for place in range(max(counts.values())) for gpu in found if place < counts[gpu]]


def fitting(cfgs: Sequence[Config], total: int) -> int:
    """How many of `cfgs` fit on a GPU of `total` bytes at once; at least one, which is checked when it
    starts."""
    largest = max(max(needs(cfg, model_config(cfg), total).values()) for cfg in _different(cfgs))
    return max(1, int(SHARE * total) // (largest + CONTEXT))


def _different(cfgs: Sequence[Config]) -> list[Config]:
    """`cfgs` that differ in more than their run section."""
    return list({repr([part for name, part in cfg if name != "run"]): cfg for cfg in cfgs}.values())
