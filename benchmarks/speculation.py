"""Speculation in the embedded engine: the same rollout with and without drafts, of a model that was trained.

    jaxfp8rl bench speculation [--config demo] [--sft-steps 300] [--rows 16] [--new-tokens 512] [--drafts 2 4
    8] jaxfp8rl bench speculation --config demo --model.path FOLDER --task.kind file ...

A model with random weights repeats nothing and accepts nothing, so it has to be a trained one: --model.path
FOLDER, or the config's own after --sft-steps of its warm start. Other words are overrides of the config, as
of `train`. As many completions as rows are decoded, --completions a prompt, so that idle rows appear as
completions end: what is measured is the tail of a step. "all at once" has twice as many rows as completions,
so that drafts are verified from the first token on. Each figure is the least of --repeat runs after one that
compiles. Tokens are compared with those without drafts.

On a CPU it shows that the tokens are equal; the speed is a GPU's question.

Needs no GPU.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write


def main() -> None:
    parser = arguments(__doc__, "speculation")
    parser.add_argument("--config", default="demo")
    parser.add_argument("--sft-steps", type=int, default=0, help="of the config's warm start: %(default)s")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--completions", type=int, default=4, help="of a prompt: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=0, help="at most; 0: the config's")
    parser.add_argument("--drafts", type=int, nargs="+", default=[4])
    parser.add_argument("--repeat", type=int, default=3)
    args, args.words = parser.parse_known_args()
    records, rows = [], []
    for fill, least in (("tail", args.rows), ("all at once", 2 * args.rows)):
        plain, said = measure(args, 0, least)
        records.append(plain | {"fill": fill})
        for drafts in args.drafts:
            found, same = measure(args, drafts, least)
            records.append(found | {"fill": fill, "equal_tokens": equal(said, same)})
            rows.append(row(f"{fill}, {args.rows} completions, {drafts} drafts", "rollout", "s", found["seconds"],
                            plain["seconds"], "no drafts, same run", True))
    write(args.out, "speculation", rows, args.plot, records=records)


def measure(args, drafts: int, least: int) -> tuple[dict, list]:
    """(a record, the completions) of the embedded engine with so many drafts."""
    from bridges.api import GenRequest
    from jaxfp8rl.config.toml import load_config
    from jaxfp8rl.data.dataset import PromptStream
    from jaxfp8rl.training import loop
    from jaxfp8rl.training.context import build_run
    from jaxfp8rl.training.warm_start import warm_start

    words = ["--run.dir", "unused", "--sft.steps", str(args.sft_steps), "--rollout.min_num_seqs", str(least),
             "--rollout.max_num_seqs", str(least), *args.words]
    if drafts:
        words += ["--rollout.speculation", "suffix", "--rollout.draft_tokens", str(drafts)]
    if args.new_tokens:
        words += ["--rollout.max_new_tokens", str(args.new_tokens)]
    cfg = load_config(args.config, words)
    ctx = build_run(cfg)
    params = ctx.initial_params()
    if args.sft_steps:
        params = warm_start(cfg, ctx.model, params, (ctx.task, ctx.train, ctx.tokenizer), print, lambda step: None,
                            ctx.engine.capabilities().formats)
    loop.publish(ctx, ctx.policy(params), 1)
    problems = PromptStream(ctx.train, 0).draw(args.rows // args.completions)
    asked = [GenRequest(str(i), ctx.train[p].token_ids, ctx.sampling, args.completions, i) for i, p in enumerate(problems)]
    seconds = []
    for _ in range(args.repeat + 1):
        ctx.engine.metrics()
        began = time.perf_counter()
        groups = ctx.engine.generate(asked)
        seconds.append(time.perf_counter() - began)
    told = ctx.engine.metrics()
    tokens = [c for g in groups for c in g]
    record = {"drafts": drafts, "seconds": min(seconds[1:]), "tokens": sum(len(c.token_ids) for c in tokens),
              "longest": max(len(c.token_ids) for c in tokens), "mean_logp": float(np.concatenate(
                  [c.logprobs for c in tokens]).mean()), **told}
    ctx.close()
    return record, tokens


def equal(before: list, now: list) -> float:
    """The share of completions whose tokens are equal."""
    return float(np.mean([np.array_equal(a.token_ids, b.token_ids) for a, b in zip(before, now, strict=True)]))


if __name__ == "__main__":
    main()
