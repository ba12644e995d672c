"""The memory and the compilation of a preset's update on a GPU, without an engine: the plan, the buffers of
XLA and the allocator's peak.

    jaxfp8rl bench update_memory PRESET [--ballast 2.5] [--updates 2] [--section.key VALUE ...]

The programs are lowered one after the other and compile in threads, as those of a run do, from shapes alone.
The weights are zeros, and one sequence is scored and learned from: both cost as much memory as a full batch.
--ballast: GiB that are taken before, as an engine keeps them asleep; not counted in the peak, which is that
of JAX's allocator. The yardstick of the seconds to compile is the sum of all programs' seconds.

Needs a Hopper GPU.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import arguments, row, write
from bridges.inside_vllm.device_pool import share
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.distributed.mesh import ONE
from jaxfp8rl.memory.plan import memory_plan
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.known import shape_named
from jaxfp8rl.models.module import init_params
from jaxfp8rl.policy.initial import fresh_state
from jaxfp8rl.policy.shapes import engine_runs, microbatches_of
from jaxfp8rl.rollout.engines import expected_formats
from jaxfp8rl.training.programs import Programs, ahead_of, make_programs

GIB = 2**30
PARTS = "argument", "temp", "output", "alias", "host_argument", "host_alias", "host_temp"


def main() -> None:
    parser = arguments(__doc__, "update_memory")
    parser.add_argument("preset")
    parser.add_argument("--ballast", type=float, default=2.5, help="GiB: %(default)s")
    parser.add_argument("--updates", type=int, default=2, help="default: %(default)s")
    args, settings = parser.parse_known_args()
    share()  # the allocator of a run with vLLM
    cfg = load_config(args.preset, settings)
    model = shape_named(Path(cfg.model.path).name)
    if (formats := expected_formats(cfg, model)) is None:
        sys.exit("benchmarks/update_memory.py needs a Hopper GPU")
    programs = make_programs(cfg, model, engine_runs(cfg, model), formats, ONE)
    compiling = Compiling(programs, cfg, model)
    ballast = jnp.zeros(int(args.ballast * GIB), jnp.uint8)
    state = initial_state(programs, cfg, model)
    show("masters and moments")
    update = compiling.finish()
    peak = updates(programs, cfg, state, args.updates) - ballast.nbytes
    plan, seconds = sum(size for _, size in memory_plan(cfg, model)), compiling.seconds
    buffers = update["argument"] + update["temp"] + update["output"] - update["alias"]
    write(args.out, "update_memory", [
        row(args.preset, "programs compiled side by side", "s", compiling.together, sum(seconds.values()),
            "one after the other", True),
        row(args.preset, "peak of the learner", "GiB", peak / GIB, plan / GIB, "the plan", True),
        row(args.preset, "peak of the learner", "GiB", peak / GIB, buffers / GIB, "XLA's buffers", True),
    ], args.plot, seconds=seconds)


class Compiling:
    """The programs of a learner, lowered one after the other and compiled in threads. `seconds` and `sizes`
    (bytes by PARTS) are by the names of the programs."""

    def __init__(self, programs: Programs, cfg: Config, model: ModelConfig):
        self.seconds: dict[str, float] = {}
        self.sizes: dict[str, dict[str, int]] = {}
        self._begun = time.monotonic()
        self._threads = []
        for program in ahead_of(programs, cfg, model, ONE).values():
            start = time.monotonic()
            lowered = program.lower()
            print(f"{program.name}: lowered in {time.monotonic() - start:.1f} s", flush=True)
            self._threads.append(threading.Thread(target=self._one, args=(lowered,)))
            self._threads[-1].start()

    def _one(self, lowered: jax.stages.Lowered) -> None:
        start = time.monotonic()
        program: Any = lowered.compile()
        name = program.runtime_executable().hlo_modules()[0].name
        self.seconds[name] = time.monotonic() - start
        self.sizes[name] = {key: getattr(program.memory_analysis(), f"{key}_size_in_bytes") for key in PARTS}

    def finish(self) -> dict[str, int]:
        """Wait for all programs, and return the sizes of the update."""
        for thread in self._threads:
            thread.join()
        self.together = time.monotonic() - self._begun
        for name, sizes in self.sizes.items():
            print(f"{name}: {self.seconds[name]:.1f} s to compile; GiB:",
                  *(f"{key} {size / GIB:.2f}" for key, size in sizes.items()), flush=True)
        return self.sizes["jit_update"]


def packed(cfg: Config, samples: list[Sample]) -> Any:
    return pack(samples, cfg.train.row_tokens, cfg.train.rows_per_microbatch, microbatches_of(cfg))


def initial_state(programs: Programs, cfg: Config, model: ModelConfig) -> Any:
    like = jax.eval_shape(lambda key: init_params(model, key), jax.random.key(0))
    zeros = jax.tree.map(lambda s: np.zeros(s.shape, np.float32), like)
    return jax.block_until_ready(fresh_state(zeros, programs.optimizer, cfg.precision.compute_dtype, ONE))


def updates(programs: Programs, cfg: Config, state: Any, count: int) -> int:
    """Score and update `count` times, and return the allocator's peak in bytes."""
    policy: Any = jax.block_until_ready(programs.policy(state.params))
    if programs.kv_scales:
        policy |= ONE.place({"kv_scales": programs.kv_scales.unit_scales()})
    peak, n = show("with the policy"), min(1000, cfg.train.row_tokens)
    batch = packed(cfg, [Sample(range(1, 9), range(1, n - 8), np.full(n - 9, -11.0, np.float32), 1.0)])
    for number in range(1, count + 1):
        old = jax.block_until_ready((programs.kv_scales or programs).score(policy, batch))
        show(f"scored {number}")
        start = time.monotonic()
        state, policy, _ = jax.block_until_ready(programs.train_step(state, policy, batch, old, None, None))
        peak = show(f"updated {number}, {time.monotonic() - start:.1f} s")
    return peak


def show(what: str) -> int:
    """Print the memory in use, and return the allocator's peak in bytes."""
    stats = jax.local_devices()[0].memory_stats() or {}
    used, peak = (stats.get(key, 0) for key in ("bytes_in_use", "peak_bytes_in_use"))
    print(f"{what}: {used / GIB:.2f} GiB in use, {peak / GIB:.2f} at the peak", flush=True)
    return peak


if __name__ == "__main__":
    main()
