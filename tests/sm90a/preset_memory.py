"""The memory that XLA needs for an update of each preset that is named after GPUs, beside the plan:

    SM90A=.venv-sm90a JAX_PLATFORMS=cpu python tests/sm90a/preset_memory.py [PRESET ...]

writes benchmarks/results/preset_memory.json, and keeps the presets there that are not named. Every update is
compiled for the GPUs that its preset names, with their memory, and vLLM's formats; the figures are those of
one GPU. `host`: the bytes of the state in pinned host memory. `program`: a hash of the program, by which a
later one can be told from it. `seconds`: those of its compilation here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from unittest import mock

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "unit/config")]

import jax
from hopper import compiled, devices, lowered
from jax.sharding import NamedSharding
from test_configs import NAMED, loaded, of_update, parts

from benchmarks.common import RESULTS, row, write
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.packing import pack
from jaxfp8rl.distributed.mesh import ALL, make_mesh_layout
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.policy.policy import partition
from jaxfp8rl.policy.shapes import engine_runs, microbatches_of
from jaxfp8rl.rollout import engines
from jaxfp8rl.training import programs
from pallas_kernels import plgpu_compat
from pallas_kernels.logprob import api as logprob

GIB = 2**30
FILE = RESULTS / "preset_memory.json"


class Memory(NamedTuple):
    """Bytes that XLA needs for an update on the device, its temporary ones among them, and those of the state
    on the host; and a hash of the program as it is lowered."""

    device: int
    temporary: int
    host: int
    program: str


def update_of(name: str) -> tuple:
    """(jitted update, its arguments as shapes) of a preset, as on the GPUs that it names."""
    return update_on(*parts(name), *loaded(name))


def update_on(gpu: str, count: int, cfg: Config, model: ModelConfig) -> tuple:
    """(jitted update, its arguments as shapes) of a config on `count` of these GPUs."""
    with mock.patch.object(engines, "device_memory", lambda: 1):  # as on a GPU
        formats = engines.expected_formats(cfg, model)
    with mock.patch.object(jax, "local_devices", lambda: devices(gpu, count)):
        layout = make_mesh_layout(cfg.train.data, cfg.train.fsdp, cfg.train.tensor)
    # there is no GPU for "auto" to find
    kernels = dict.fromkeys(("products_of", "attention_of"), lambda *_: "pallas")
    with mock.patch.multiple(programs, **kernels):
        made = programs.make_programs(cfg, model, engine_runs(cfg, model), formats, layout)
    batch = pack([], cfg.train.row_tokens, cfg.train.rows_per_microbatch, microbatches_of(cfg))
    state, policy, batch, old_logp = programs.shapes_of(made, cfg, model, batch, layout)
    if layout.mesh:  # what a run leaves to JAX is on all devices
        batch = jax.tree.map(lambda x: x.update(sharding=NamedSharding(layout.mesh, ALL)), batch)
    return made.train_step.__wrapped__, (state, *partition(policy), batch, old_logp)


def memory_of(name: str) -> Memory:
    """The memory of a preset's update, compiled for its GPUs."""
    jitted, arguments = update_of(name)
    program = lowered(parts(name)[0], jitted, *arguments)
    m = compiled(program).memory_analysis()
    device = m.argument_size_in_bytes + m.temp_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return Memory(device, m.temp_size_in_bytes, m.host_argument_size_in_bytes,
                  hashlib.sha256(program.as_text().encode()).hexdigest()[:16])


def write_all(presets: dict[str, dict]) -> None:
    """Write the figures of all presets beside their plans of today."""
    presets = {name: presets[name] for name in sorted(presets)}
    plan = lambda name: of_update(*loaded(name))
    rows = [row(f"{name}, an update", "plan over XLA's memory", "GiB", plan(name) / GIB,
                figures["device"] / GIB, "XLA's buffers") for name, figures in presets.items()]
    write(FILE, "preset_memory", rows, presets=presets)


def main(names: list[str]) -> None:
    presets = json.loads(FILE.read_text())["presets"] if FILE.exists() else {}
    for name in names or NAMED:
        start = time.monotonic()
        presets[name] = memory_of(name)._asdict() | {"seconds": time.monotonic() - start}
        write_all(presets)


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """The Hopper kernels are taken, although there is no GPU for "auto" to find."""
    here = jax.local_devices()[0]
    with (mock.patch.object(logprob, "use_kernel", lambda backend: True),
          mock.patch.object(plgpu_compat, "device", lambda: here)):
        yield


if __name__ == "__main__":
    with without_a_gpu():
        main(sys.argv[1:])
