"""A step of the embedded engine's decoding, beside its floor and kernel by kernel: Qwen3 shapes, random
weights.

    jaxfp8rl bench engine_decode [--size 1.7b] [--rows 64] [--context 1152] [--recipe fp8] [--variants]

All rows decode, none stops, and each has --context tokens of keys and values at first. "step" is the time of
the loop on the device divided by its steps. "kernels" is what the GPU is busy with in a step under the
profiler, where XLA records no command buffers; `each` has the time and the number of calls of every kernel.
The floor is the time of reading the weights, the head and the cache once at RATE. --variants also times the
step under other options of XLA.

Needs a GPU.
"""

from __future__ import annotations

import argparse
import collections
import functools
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import MIXTURES, SHAPES, arguments, require_gpu, row, size_of, write
from benchmarks.engine_rollout import RECIPES, config_of, random_engine

RATE = {"H100": 3.35e12, "H200": 4.8e12}  # bytes a second, as the vendor says
VARIANTS = {
    "loops recorded": {"xla_gpu_command_buffer_unroll_loops": True,
                       "xla_gpu_enable_command_buffer":
                           "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"},
    "nothing recorded": {"xla_gpu_graph_min_graph_size": 1_000_000},
}
SHOWN = 60  # the number of kernels that are listed


def main() -> None:
    parser = arguments(__doc__, "engine_decode")
    parser.add_argument("--size", choices=[*SHAPES, *MIXTURES], default="1.7b")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--rows", type=int, default=64, help="decoded at once: %(default)s")
    parser.add_argument("--context", type=int, default=1152, help="tokens of each row: %(default)s")
    parser.add_argument("--steps", type=int, default=64, help="of one call: %(default)s")
    parser.add_argument("--recipe", choices=RECIPES, default="fp8")
    parser.add_argument("--variants", action="store_true", help="also other options of XLA")
    parser.add_argument("--anywhere", action="store_true", help="without a GPU, too: to try the script")
    args = parser.parse_args()
    require_gpu(__file__, anywhere=args.anywhere)
    case = f"Qwen3-{size_of(args)}, {args.rows} rows of {args.context}, {args.recipe}"
    rows, busy = measured(args, case)
    write(args.out, "engine_decode", rows, args.plot, each={case: busy})


def measured(args: argparse.Namespace, case: str) -> tuple[list[dict], dict[str, tuple[float, float]]]:
    """The rows of the result, and of each kernel its milliseconds and calls in a step."""
    engine = engine_of(args)
    floor, run, rows = floor_ms(engine, args), Decoding(engine, args), []
    step = lambda name, ms: row(f"{case}{name}", "step", "ms", ms, floor, "bytes at the vendor's rate", True)
    program = run.program({})
    rows.append(step("", run.step_ms(program)))
    print(f"a step: {rows[0]['ours']:.3f} ms, its floor {floor:.3f} ms", flush=True)
    for name, options in VARIANTS.items() if args.variants else ():
        try:
            rows.append(step(f", {name}", run.step_ms(run.program(options))))
            print(f"{name}: {rows[-1]['ours']:.3f} ms", flush=True)
        except Exception as error:  # an option that this XLA does not have is no reason to lose the rest
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    if busy := run.kernels(program):
        total = sum(ms for ms, _ in busy.values())
        rows.append(row(case, "kernels", "ms", total, floor, "bytes at the vendor's rate", True))
        print(listed(busy, origins(program)), flush=True)
    return rows, busy


def engine_of(args: argparse.Namespace) -> Any:
    """The embedded engine with random weights."""
    new = args.context + 16 * args.steps  # enough for all calls
    cfg = config_of("embedded", argparse.Namespace(**{**vars(args), "new_tokens": new, "queue": 1}))
    return random_engine(cfg)[0]


def floor_ms(engine: Any, args: argparse.Namespace) -> float:
    """The time of reading, once, all weights but the embedding, the head, and the keys and values of all
    rows."""
    import jax

    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    params, page = engine._params, engine._model.page
    read = size(params["layers"]) + size(params.get("lm_head", params["embed_tokens"]))
    slot = size(jax.eval_shape(lambda: engine._model.init_cache(1))) / page
    kind = jax.devices()[0].device_kind
    rate = next((r for name, r in RATE.items() if name in kind), RATE["H100"])
    return 1e3 * (read + slot * args.rows * (args.context + args.steps / 2)) / rate


class Decoding:
    """The loop on the device over rows that decode for ever."""

    def __init__(self, engine: Any, args: argparse.Namespace):
        self.engine, self.args = engine, args

    def batch(self) -> tuple[Any, Any]:
        """(a batch whose rows have --context tokens each, their orders)."""
        import jax
        import jax.numpy as jnp

        from bridges.engines import batch as device

        flights, model, rows = self.engine._flights, self.engine._model, self.args.rows
        M = flights._row_pages
        b = device.empty(model, rows=rows, sequences=rows, pages=rows * M, row_pages=M,
                         max_new=self.args.context,
                         support=0, width=flights._width(self.engine._params))
        key = jax.random.key(0)
        table = jax.random.permutation(key, rows * M).astype(jnp.int32).reshape(rows, M)
        state = device.Rows(jnp.arange(rows, dtype=jnp.int32), jnp.full(rows, self.args.context, jnp.int32),
                            jnp.zeros(rows, jnp.int32), jax.random.normal(key, b.rows.hidden.shape,
                                                                          b.rows.hidden.dtype),
                            table)
        drawn = b.drawn._replace(status=jnp.full(rows, device.RUNNING, jnp.int32))
        pages = b.pages._replace(left=jnp.int32(0))
        prompts = b.prompts._replace(users=jnp.ones(rows, jnp.int32))
        ints = lambda fill: np.full(rows, fill, np.int32)
        orders = device.Orders(
            np.arange(rows, dtype=np.int32), np.arange(rows, dtype=np.int32), ints(0), ints(2**30),
            np.arange(2 * rows, dtype=np.uint32).reshape(rows, 2), np.ones(rows, np.float32),
            np.zeros(rows, bool),
            ints(0), np.ones(rows, np.float32), np.full((rows, 4), -1, np.int32),
            np.arange(rows, dtype=np.int32)[:, None])
        return b._replace(pages=pages, rows=state, drawn=drawn, prompts=prompts), orders

    def program(self, options: dict) -> Any:
        """The loop, compiled."""
        import jax

        from bridges.engines import batch as device
        from bridges.engines.draw import Filters
        from bridges.engines.flights import COMPILED

        advance = jax.jit(functools.partial(device.advance, self.engine._model), donate_argnums=1,
                          static_argnames=("filters",), compiler_options=COMPILED | options)
        b, orders = self.batch()
        return advance.lower(self.engine._params, b, orders, *self.queue, steps=np.int32(1),
                             filters=Filters()).compile()

    @property
    def queue(self) -> tuple:
        return np.zeros(self.args.rows, np.int32), np.int32(0), np.bool_(False)

    def run(self, program: Any, b: Any, orders: Any, steps: int) -> Any:
        import jax

        return jax.block_until_ready(program(self.engine._params, b, orders, *self.queue,
                                             steps=np.int32(steps)))

    def step_ms(self, program: Any) -> float:
        """The least time of a step, of three calls."""
        (b, orders), times = self.batch(), []
        b = self.run(program, b, orders, 2)
        for _ in range(3):
            start = time.perf_counter()
            b = self.run(program, b, orders, self.args.steps)
            times.append(time.perf_counter() - start)
        assert int(b.rows.position[0]) == self.args.context + 2 + 3 * self.args.steps, "a row stopped"
        return 1e3 * min(times) / self.args.steps

    def kernels(self, program: Any) -> dict[str, tuple[float, float]]:
        """Milliseconds and calls in a step, by operation of XLA and kernel; nothing without a GPU."""
        import jax

        steps, (b, orders) = 8, self.batch()
        b = self.run(program, b, orders, 2)
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder):
                self.run(program, b, orders, steps)
            [file] = Path(folder).rglob("*.xplane.pb")
            profile = jax.profiler.ProfileData.from_file(str(file))
            found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
            for plane in profile.planes:
                for line in plane.lines if plane.name.startswith("/device:GPU:0") else ():
                    for event in line.events if "Stream" in (line.name or "") else ():
                        name = f"{dict(event.stats).get('hlo_op', '')} {event.name[:50]}"
                        found[name][0] += event.duration_ns / 1e6 / steps
                        found[name][1] += 1 / steps
        return {name: (ms, calls) for name, (ms, calls) in found.items()}


def origins(program: Any) -> dict[str, str]:
    """Of each operation of a program, the end of its name in the source."""
    found = re.findall(r'%?([\w.\-]+) = [^\n]*?op_name="([^"]*)"', program.as_text() or "")
    return {name: origin[-60:] for name, origin in found}


def listed(busy: dict[str, tuple[float, float]], origins: dict[str, str]) -> str:
    """A table of the kernels that take the longest."""
    order = sorted(busy, key=lambda name: -busy[name][0])
    lines = [f"{1e3 * busy[name][0]:9.1f} us {busy[name][1]:7.1f} calls "
             f"{1e3 * busy[name][0] / busy[name][1]:8.2f} us each  {name[:80]:80} "
             f"{origins.get(name.split(' ')[0], '')}" for name in order[:SHOWN]]
    calls, ms = (sum(busy[name][i] for name in busy) for i in (1, 0))
    return "\n".join([f"a step: {calls:.0f} kernels, {1e3 * ms:.0f} us", *lines])


if __name__ == "__main__":
    main()
