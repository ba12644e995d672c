"""The cost of the correction: every kind of it on 64 packed rows of 8,192 tokens, against one pass over the
same arrays.

    jaxfp8rl bench corrections_time [--demo RUN]

`rollout_correction` with all its metrics, jitted alone; the median of the host's time over synchronous calls.
The yardsticks are the same program for preset "none", which computes only the metrics, and a copy of the four
inputs, the lower bound. --demo: a run directory on this machine; the correction should take a hundredth of
its median step.

Needs no GPU.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import arguments, clocked, row, write
from jaxfp8rl.losses.correction import CorrectionConfig
from jaxfp8rl.losses.correction import rollout_correction as correct
from jaxfp8rl.losses.presets import get_preset
from jaxfp8rl.monitors.jsonl import read_metrics

PRESETS = (
    "token_tis", "sequence_tis", "geometric_mask", "verl/decoupled_k3_rs_seq_tis", "slime/mis_sequence",
    "areal/m2po", "ais",
)


def main() -> None:
    parser = arguments(__doc__, "corrections_time")
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--demo", help="run directory of the demo, for its step time")
    args = parser.parse_args()
    arrays = batch(args.rows, args.tokens)
    case = f"{args.rows} x {args.tokens} tokens"
    floor = seconds(jax.jit(lambda *a: jax.tree.map(lambda x: x + x if x.dtype != bool else ~x, a)), arrays,
                    args.calls)
    none = seconds(jitted(get_preset("none")), arrays, args.calls)
    rows = [row(case, "none", "ms", none * 1e3, floor * 1e3, "a copy of the inputs", True)]
    for name in args.presets:
        taken = seconds(jitted(get_preset(name)), arrays, args.calls)
        rows.append(row(case, name, "ms", taken * 1e3, none * 1e3, "metrics alone (preset none)", True))
    if args.demo:
        rows.append(demo_row(Path(args.demo), args.calls))
    write(args.out, "corrections_time", rows, args.plot)


def jitted(config: CorrectionConfig):
    return jax.jit(lambda old, rollout, mask, segment_ids: correct(old, rollout, mask, config, segment_ids))


def batch(rows: int, tokens: int) -> tuple:
    """Packed rows as in RL: masked prompts, log-normal lengths, a mismatch of 0.05 nats."""
    rng = np.random.default_rng(0)
    ids, mask = np.zeros((rows, tokens), np.int32), np.zeros((rows, tokens), bool)
    for r in range(rows):
        at, n = 0, 1
        while at < tokens - 64:
            length = min(int(rng.lognormal(6.5, 1.0)) + 16, tokens - at)
            ids[r, at : at + length], mask[r, at + 8 : at + length] = n, True
            at, n = at + length, n + 1
    old = -rng.exponential(0.5, (rows, tokens)).astype(np.float32)
    rollout = np.minimum(old + 0.05 * rng.standard_normal((rows, tokens)).astype(np.float32), 0)
    return tuple(map(jnp.asarray, (old, rollout, mask, ids)))


def seconds(f, arrays: tuple, calls: int) -> float:
    """The median time of a call, without compilation and two warm-up calls."""
    return statistics.median([clocked(lambda: f(*arrays)) for _ in range(3 + calls)][3:])


def demo_row(run: Path, calls: int) -> dict:
    """The correction at the demo's own packed shape, against the demo's median step."""
    from jaxfp8rl.config.toml import load_config
    from jaxfp8rl.data.packing import microbatches_needed

    cfg = load_config(str(run / "config.toml"))
    samples = cfg.rollout.prompts_per_step // cfg.train.updates_per_step * cfg.rollout.samples_per_prompt
    m = microbatches_needed(samples, cfg.max_model_len, cfg.train.row_tokens, cfg.train.rows_per_microbatch)
    shape = (m, cfg.train.rows_per_microbatch, cfg.train.row_tokens)
    flat = batch(m * cfg.train.rows_per_microbatch, max(cfg.train.row_tokens, 128))
    arrays = tuple(x[:, : cfg.train.row_tokens].reshape(shape) for x in flat)
    taken = seconds(jitted(cfg.correction.resolve()), arrays, calls)
    step = statistics.median(r["time/step_s"] for r in read_metrics(run / "metrics.jsonl") if r["step"] > 1)
    return row("the demo's step", cfg.correction.preset, "ms", taken * 1e3, step * 1e3, "the whole step",
               True)


if __name__ == "__main__":
    main()
