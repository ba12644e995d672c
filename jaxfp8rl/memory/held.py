"""What holds the memory of a device at a moment: the arrays of a run by their kind, the programs at work, and
everything else on the device."""

from __future__ import annotations

import collections
import contextlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxfp8rl.config.schema import Config
from jaxfp8rl.memory.plan import Plan
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.policy.adapters import masters_like
from jaxfp8rl.rollout.gpu_memory import device_in_use

MASTERS, MOMENTS = "master weights", "Adam's two moments"  # as the plan's rows begin
OTHERS, PROGRAMS = "other arrays", "programs at work, with what they were given"
REST = "everything else: the engine, CUDA"
UNITS = {"": 1, "bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
ASKED = re.compile(r"allocat\w* ([\d.]+) ?(bytes|[KMG]iB|B)?")
GIB = 2**30


class Usage(NamedTuple):
    """Bytes on the first device. items: by kind, in order. asked: of the allocation that failed, 0 if the
    error does not say. programs: buffers that belong to no array, with what was donated to them."""

    items: dict[str, int]
    asked: int

    @property
    def wanted(self) -> int:
        """What the device would have had to hold."""
        return sum(self.items.values()) + self.asked


def usage(error: str, kinds: Mapping[str, Any] | None = None) -> Usage:
    """What holds the first device's memory now, and what the failed allocation of `error` asked for. kinds:
    of `kinds_of`; without them all arrays are of one kind."""
    device = jax.local_devices()[0]
    found = _arrays(device, kinds or {})
    held, known = sum(found.values()), device.memory_stats() or {}
    in_use = max(known.get("bytes_in_use", held), held)
    return Usage({**found, PROGRAMS: in_use - held, REST: beside_jax(in_use)}, asked(error))


def beside_jax(in_use: int = 0) -> int:
    """The bytes of the first device that others hold than JAX's allocator of this process, which holds
    `in_use` at least; 0 on a CPU. What the allocator has in reserve is its own."""
    known = jax.local_devices()[0].memory_stats() or {}
    taken = max(known.get("pool_bytes", 0), known.get("bytes_in_use", 0), in_use)
    with contextlib.suppress(OSError, RuntimeError):  # an error of the driver must not hide XLA's
        return max((device_in_use() or 0) - taken, 0)
    return 0


def asked(error: str) -> int:
    """The bytes of the allocation that XLA's error names; 0 without one."""
    found = ASKED.search(error.replace(",", ""))
    return int(float(found[1]) * UNITS[found[2] or ""]) if found else 0


def format_usage(plan: Plan, held: Usage, needed: int) -> str:
    """A table in GiB: the plan's rows of a stage that needs `needed` bytes, beside what was held. A row that
    no arrays hold between programs has no figure of its own."""
    of_plan = {MASTERS: MASTERS, MOMENTS: MOMENTS, "policy": OTHERS}
    left, rows, programs = dict(held.items), [], 0
    for what, size in plan:
        kind = next((kind for start, kind in of_plan.items() if what.startswith(start)), "")
        rows.append((f"{what}{', batches and other arrays' * (kind == OTHERS)}", size, left.pop(kind, None)))
        programs += 0 if kind or what.startswith("reference") else size
    planned = {PROGRAMS: programs, REST: needed - sum(size for _, size in plan)}
    rows += [(what, planned.get(what), size) for what, size in left.items()]
    rows += [("asked for when it failed", None, held.asked)] if held.asked else []
    rows.append(("in all", needed, held.wanted))
    cell = lambda size: f"{'' if size is None else f'{size / GIB:.2f}':>9}"
    lines = [f"  {cell(p)}{cell(h)}  {what}" for what, p, h in rows]
    return "\n".join([f"  {'plan':>9}{'held':>9}  GiB", *lines])


def format_held(held: Usage) -> str:
    """The same table without a plan."""
    rows = {**held.items, **({"asked for when it failed": held.asked} if held.asked else {}),
            "in all": held.wanted}
    return "\n".join([f"  {'held':>9}  GiB", *(f"  {size / GIB:>9.2f}  {what}" for what, size in rows.items())])


def kinds_of(cfg: Config, model: ModelConfig, learns: bool = True) -> dict[str, Any]:
    """The shapes and types of a run's arrays, a tree of each kind: masters and, if it `learns`, moments."""
    state = jax.eval_shape(lambda params: init_state(params, make_optimizer(cfg.optim, cfg.updates)),
                           masters_like(cfg, model))
    return {MASTERS: state.params} | ({MOMENTS: state.opt_state} if learns else {})


def _arrays(device: Any, kinds: Mapping[str, Any]) -> dict[str, int]:
    """The bytes of all arrays on `device` by kind. A kind is known by shape and type: of equal arrays the
    first are taken for the first kind."""
    live = collections.Counter()
    for array in jax.live_arrays():
        if not array.is_deleted() and array.sharding.memory_kind in (None, "device", "unpinned_host"):
            live[array.shape, array.dtype, _bytes_on(array, device)] += 1
    items = {kind: _taken(live, tree) for kind, tree in kinds.items()}
    return items | {OTHERS: sum(size * count for (_, _, size), count in live.items())}


def _bytes_on(array: jax.Array, device: Any) -> int:
    return sum(shard.data.nbytes for shard in array.addressable_shards if shard.device == device)


def _taken(live: collections.Counter, tree: Any) -> int:
    """Take the leaves of `tree` out of `live`; the bytes of those that are there. Scalars stay."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        for shape, dtype, size in list(live):
            if leaf.ndim and (shape, dtype) == (leaf.shape, jnp.dtype(leaf.dtype)):
                total += size
                live[shape, dtype, size] -= 1
                live += collections.Counter()  # drop what is used up
                break
    return total
