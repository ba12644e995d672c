"""Is the learner's score the embedded engine's log-probability, in every bit, and what does that cost? Qwen3
shapes, random weights, precision.exact = "engine" beside "off".

    jaxfp8rl bench one_policy [--size 1.7b] [--layers 4] [--rows 256] [--queue 10] [--new-tokens 1024]

The engine samples --queue completions for each row, of log-normal lengths and of groups of 4 that share a
prompt, so that rows are refilled and pages shared. The learner scores all of them, packed. "equal" is the
share of tokens whose log-probability has the same bits, k3 the mean of exp(d) - d - 1 of their differences.
Rates are of sampled tokens.

Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import SHAPES, arguments, require_gpu, row, size_of, write
from benchmarks.engine_rollout import PROMPT, RECIPES, config_of, lengths, random_engine

GROUP = 4
TEMPERATURE = 0.7


def main() -> None:
    parser = arguments(__doc__, "one_policy")
    parser.add_argument("--size", choices=SHAPES, default="1.7b")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--rows", type=int, default=256, help="decoded at once: %(default)s")
    parser.add_argument("--queue", type=int, default=10, help="completions a row: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=1024, help="of the longest: %(default)s")
    parser.add_argument("--row-tokens", type=int, default=16384, help="of the learner's rows: %(default)s")
    parser.add_argument("--recipe", choices=[name for name in RECIPES if name != "bf16"], default="fp8")
    parser.add_argument("--anywhere", action="store_true", help="without a GPU, too: to try the script")
    args = parser.parse_args()
    require_gpu(__file__, "a Hopper GPU", args.anywhere)
    found = {exact: measure(args, exact) for exact in ("engine", "off")}
    ours, theirs = found["engine"], found["off"]
    case = f"Qwen3-{size_of(args)}, {args.rows} x {args.new_tokens}, {args.recipe}"
    of = lambda metric, unit, smaller=False: row(case, metric, unit, ours[metric], theirs[metric],
                                                 'precision.exact = "off"', smaller)
    rows = [of("equal", "of tokens"), of("k3", "nats", True), of("rollout", "tokens/s"),
            of("score", "tokens/s")]
    write(args.out, "one_policy", rows, args.plot, each={case: found})


class Sides(NamedTuple):
    """An engine with random weights, and the learner's score with the same: score(batch) -> [M, R, T]."""

    engine: Any
    score: Any
    vocab_size: int


def sides(args: argparse.Namespace, exact: str) -> Sides:
    from jaxfp8rl.rollout.engines import expected_formats
    from jaxfp8rl.training.programs import learner_precision
    from jaxfp8rl.training.step import make_logprobs, make_score

    cfg = config_of("embedded", argparse.Namespace(**{**vars(args), "queue": GROUP}))
    cfg = cfg.model_copy(update={"precision": cfg.precision.model_copy(update={"exact": exact})})
    engine, model, runs = random_engine(cfg)
    formats = expected_formats(cfg, model)
    assert formats is not None
    score = make_score(make_logprobs(model, learner_precision(cfg, model, runs, formats), TEMPERATURE,
                                     "layer"))
    return Sides(engine, lambda batch: score(engine._params, batch), model.vocab_size)


def sampled(s: Sides, args: argparse.Namespace, counts: np.ndarray) -> tuple[list, float]:
    """(samples of completions of so many tokens, in groups of GROUP, the seconds that they took)."""
    from bridges.api import GenRequest, SamplingParams
    from jaxfp8rl.data.packing import Sample

    prompts = np.random.default_rng(1).integers(0, s.vocab_size, (len(counts) // GROUP, PROMPT)).tolist()
    requests = [GenRequest(str(i), tuple(p), SamplingParams(int(n), temperature=TEMPERATURE), GROUP, seed=i)
                for i, (p, n) in enumerate(zip(prompts, counts))]
    began = time.perf_counter()
    groups = s.engine.generate(requests)
    seconds = time.perf_counter() - began
    return [Sample(p, c.token_ids, c.logprobs, 0.0) for p, g in zip(prompts, groups) for c in g], seconds


def scored(s: Sides, args: argparse.Namespace, samples: list) -> tuple[np.ndarray, np.ndarray, float]:
    """(the engine's and the learner's log-probabilities of all sampled tokens, the seconds of the second
    scoring)."""
    import jax

    from jaxfp8rl.data.packing import assign_rows, pack

    rows = len(assign_rows([len(x.prompt) + len(x.completion) for x in samples], args.row_tokens))
    batch = pack(samples, args.row_tokens, 1, rows)
    found = np.asarray(s.score(batch))
    began = time.perf_counter()
    jax.block_until_ready(s.score(batch))
    live = batch.response_mask
    return batch.rollout_logp[live], found[live], time.perf_counter() - began


def measure(args: argparse.Namespace, exact: str) -> dict[str, float]:
    s = sides(args, exact)
    counts = lengths(args.rows * args.queue, args.new_tokens)
    counts[0] = args.new_tokens * 3 // 4 + 1  # the shape that is compiled first
    sampled(s, args, np.where(np.arange(len(counts)) == 0, counts, 4))
    samples, seconds = sampled(s, args, counts)
    engine, learner, score_seconds = scored(s, args, samples)
    apart = (learner - engine).astype(np.float64)
    result = {"tokens": len(engine), "equal": float((engine.view(np.int32) == learner.view(np.int32)).mean()),
              "k3": float(np.mean(np.expm1(apart) - apart)), "largest": float(np.abs(apart).max()),
              "rollout": len(engine) / seconds, "score": len(engine) / score_seconds}
    print(f'exact "{exact}": ' + ", ".join(f"{name} {x:,.6g}" for name, x in result.items()), flush=True)
    s.engine.close()
    return result


if __name__ == "__main__":
    main()
