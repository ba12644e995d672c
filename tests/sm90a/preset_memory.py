"""The memory that XLA needs for an update of each preset for one GPU, beside the plan:

    SM90A=.venv-sm90a JAX_PLATFORMS=cpu python tests/sm90a/preset_memory.py [PRESET ...]

writes benchmarks/results/preset_memory.json. Every update is compiled for the GPU that its preset names, with
that GPU's memory, and vLLM's formats. `host`: the bytes of the state in pinned host memory. `program`: a hash
of the program, so that a change of the code shows whether the figures still belong to it.
"""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "unit/config")]

from hopper import compiled, lowered
from test_configs import NAMED, loaded, parts

from benchmarks.common import RESULTS, row, write
from jaxfp8rl.data.packing import pack
from jaxfp8rl.distributed.mesh import ONE
from jaxfp8rl.memory.plan import memory_plan
from jaxfp8rl.policy.policy import partition
from jaxfp8rl.policy.shapes import engine_runs, microbatches_of
from jaxfp8rl.rollout import engines
from jaxfp8rl.training import programs
from pallas_kernels.logprob import api as logprob

GIB = 2**30
ON_ONE = [name for name in NAMED if parts(name)[1] == 1]


class Memory(NamedTuple):
    """Bytes of an update: those planned, those XLA needs on the device and its temporary ones among them, and
    those of the state on the host."""

    plan: int
    device: int
    temporary: int
    host: int


def update_of(name: str) -> tuple:
    """(jitted update, its arguments as shapes) of a preset, as on the GPU that it names."""
    cfg, model = loaded(name)
    with mock.patch.object(engines, "device_memory", lambda: 1):  # as on a GPU
        formats = engines.expected_formats(cfg, model)
    # there is no GPU for "auto" to find
    kernels = dict.fromkeys(("products_of", "attention_of"), lambda *_: "pallas")
    with mock.patch.multiple(programs, **kernels):
        made = programs.make_programs(cfg, model, engine_runs(cfg, model), formats, ONE)
    batch = pack([], cfg.train.row_tokens, cfg.train.rows_per_microbatch, microbatches_of(cfg))
    state, policy, batch, old_logp = programs.shapes_of(made, cfg, model, batch, ONE)
    return made.train_step.__wrapped__, (state, *partition(policy), batch, old_logp)


def memory_of(name: str) -> Memory:
    jitted, arguments = update_of(name)
    m = compiled(parts(name)[0], jitted, *arguments).memory_analysis()
    device = m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    plan = sum(size for _, size in memory_plan(*loaded(name)))
    return Memory(plan, device, m.temp_size_in_bytes, m.host_argument_size_in_bytes)


def program_of(name: str) -> str:
    """A hash of the preset's update as it is lowered."""
    jitted, arguments = update_of(name)
    return hashlib.sha256(lowered(parts(name)[0], jitted, *arguments).as_text().encode()).hexdigest()[:16]


def main(names: list[str]) -> None:
    rows, each = [], {}
    for name in names or ON_ONE:
        start = time.monotonic()
        found = memory_of(name)
        each[name] = found._asdict() | {"program": program_of(name)}
        rows.append(row(f"{name}, an update", "plan over XLA's memory", "GiB", found.plan / GIB,
                        found.device / GIB, "XLA's buffers"))
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
        write(RESULTS / "preset_memory.json", "preset_memory", rows, presets=each)


if __name__ == "__main__":
    with mock.patch.object(logprob, "use_kernel", lambda backend: True):  # there is no GPU for "auto" to find
        main(sys.argv[1:])
