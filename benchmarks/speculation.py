"""Speculation in the embedded engine: the same rollout with and without drafts, of a model that was trained.

    jaxfp8rl bench speculation [--config demo] [--sft-steps 300] [--rows 16] [--drafts 2 4 8]
    jaxfp8rl bench speculation --config demo --model.path FOLDER --task.kind file ...
    jaxfp8rl bench speculation --config benchmarks/speculation.toml --run-steps 20 [--fills 2 5]
    jaxfp8rl bench speculation --simulate

A model with random weights repeats nothing and accepts nothing, so it has to be a trained one: --model.path
FOLDER, or the config's own after --sft-steps of its warm start, or after a run of --run-steps of it, warm
start included; the last two train a draft head, too. Other words are overrides of the config, as of `train`.
As many completions as rows are decoded, --completions a prompt, so that idle rows appear as completions end:
what is measured is the tail of a step. --fills 2 has twice as many rows as completions, so that drafts are
verified from the first token on, one of each; 1 + N has room for N. Each figure is the least of --repeat runs
after one that compiles. Tokens are compared with those without drafts.

On a CPU it shows that the tokens are equal, and how many a step takes; the speed is a GPU's question.

--simulate runs no model: a draft is right with a probability that is given, the lengths are log-normal
(median 1,500, at most 8,192), and a step lasts as long as the bytes of Qwen3-8B in FP8 that it reads.

Needs no GPU.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, opened, row, write


def main() -> None:
    parser = arguments(__doc__, "speculation")
    parser.add_argument("--config", default="demo")
    parser.add_argument("--sft-steps", type=int, default=0, help="of the config's warm start: %(default)s")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--completions", type=int, default=4, help="of a prompt: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=0, help="at most; 0: the config's")
    parser.add_argument("--drafts", type=int, nargs="+", default=[4])
    parser.add_argument("--how", nargs="+", choices=["suffix", "head"],
                        help="the kinds of drafts; default: all that there are")
    parser.add_argument("--run-steps", type=int, default=0,
                        help="of a run whose weights and draft head are measured")
    parser.add_argument("--fills", type=int, nargs="+", default=[1, 2],
                        help="rows for each completion: %(default)s")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--simulate", action="store_true")
    args, args.words = parser.parse_known_args()
    if args.simulate:
        records = simulated()
        write(args.out, "speculation_simulated", [row(
            f"{r['sequences']} sequences, {r['drafts']} drafts, each right with {r['right']:g}",
            "rollout, simulated", "s",
            r["seconds"], r["plain_seconds"], "no drafts, simulated", True) for r in records], args.plot,
              records=records)
        return
    taught = bool(args.run_steps or args.sft_steps)
    args.how = args.how or (["suffix", "head"] if taught else ["suffix"])
    if "head" in args.how and not taught:
        parser.error("--how head: no draft head has been trained; give --run-steps or --sft-steps")
    args.trained, learned = run(args) if args.run_steps else ("", [])
    records, rows = [], []
    for fill in args.fills:
        plain, said = measure(args, "off", 0, fill * args.rows)
        records.append(plain | {"fill": fill})
        for how, drafts in itertools.product(args.how, args.drafts):
            found, same = measure(args, how, drafts, fill * args.rows)
            records.append(found | {"fill": fill, "equal_tokens": equal(said, same)})
            rows.append(row(f"{fill * args.rows} rows, {args.rows} completions, {how}, {drafts} drafts",
                            "rollout", "s",
                            found["seconds"], plain["seconds"], "no drafts, same run", True))
            write(args.out, "speculation", rows, args.plot, records=records, run=learned)


def run(args) -> tuple[str, list[dict]]:
    """(the folder of a run with a draft head, what each of its steps said of the head)."""
    from jaxfp8rl.config.toml import load_config
    from jaxfp8rl.monitors.jsonl import read_metrics
    from jaxfp8rl.training import loop

    folder = tempfile.mkdtemp()
    loop.train(load_config(args.config, [
        "--run.dir", folder, "--run.steps", str(args.run_steps), "--run.save_every", str(args.run_steps),
        "--rollout.speculation", "head", *args.words]))
    of = lambda m: {k: v for k, v in m.items() if k == "reward/mean"
                    or k.startswith(("draft/", "speculation/"))}
    return folder, [{"step": m["step"], **of(m)} for m in read_metrics(Path(folder) / "metrics.jsonl")
                    if of(m)]


def measure(args, how: str, drafts: int, least: int) -> tuple[dict, list]:
    """(a record, the completions) of the embedded engine with so many drafts."""
    from bridges.api import GenRequest
    from jaxfp8rl.checkpoint.store import Checkpoints
    from jaxfp8rl.config.toml import load_config
    from jaxfp8rl.data.dataset import PromptStream
    from jaxfp8rl.training import publishing
    from jaxfp8rl.training.resume import shapes_like
    from jaxfp8rl.training.warm_start import warm_start

    words = ["--run.dir", "unused", "--sft.steps", str(args.sft_steps), *args.words,
             "--rollout.min_num_seqs", str(least), "--rollout.max_num_seqs", str(least)]
    if drafts:
        words += ["--rollout.speculation", how, "--rollout.draft_tokens", str(drafts)]
    if args.new_tokens:
        words += ["--rollout.max_new_tokens", str(args.new_tokens)]
    cfg = load_config(args.config, words)
    with opened(cfg) as ctx:
        draft = None
        if args.trained:
            state, _ = Checkpoints(Path(args.trained, "checkpoints"),
                                   1).restore(shapes_like(cfg, ctx.model, ctx.fresh_state))
            params, draft = state.params, state.draft
        else:
            params = ctx.initial_params()
        if args.sft_steps and not args.trained:
            params, draft = warm_start(cfg, ctx.model, params, (ctx.task, ctx.train, ctx.tokenizer), print,
                                       lambda step: None, ctx.engine.capabilities().formats)
        publishing.publish(ctx, ctx.policy(params), 1, draft=draft)
        problems = PromptStream(ctx.train, 0).draw(args.rows // args.completions)
        asked = [GenRequest(str(i), ctx.train[p].token_ids, ctx.sampling, args.completions, i)
                 for i, p in enumerate(problems)]
        seconds = []
        for _ in range(args.repeat + 1):
            ctx.engine.metrics()
            began = time.perf_counter()
            groups = ctx.engine.generate(asked)
            seconds.append(time.perf_counter() - began)
        told = ctx.engine.metrics()
        tokens = [c for g in groups for c in g]
        record = {"how": how, "drafts": drafts, "seconds": min(seconds[1:]),
                  "tokens": sum(len(c.token_ids) for c in tokens),
                  "longest": max(len(c.token_ids) for c in tokens), "mean_logp": float(np.concatenate(
                      [c.logprobs for c in tokens]).mean()), **told}
    return record, tokens


def equal(before: list, now: list) -> float:
    """The share of completions whose tokens are equal."""
    return float(np.mean([np.array_equal(a.token_ids, b.token_ids)
                          for a, b in zip(before, now, strict=True)]))


# Qwen3-8B, bytes: its layers in FP8, its head in BF16, the keys and values of a token in FP8, and a draft:
# the head's layer and the output head, in BF16
LAYERS, OUTPUT, OF_TOKEN = 36 * 192_937_984, 2 * 151_936 * 4096, 36 * 2 * 8 * 128
DRAFT = 2 * (2 * 4096**2 + 3 * 4096 * 12_288) + OUTPUT
BANDWIDTH = 3.35e12  # of an H100, read at once
ROWS = 64


def simulated() -> list[dict]:
    """Seconds of rollouts in 64 rows, in which each draft is right with the same probability."""
    found = []
    for sequences in (16, 64):
        for right in (0.5, 0.6, 0.7, 0.8):
            for most in (1, 2, 3):
                rng, seconds, plain = np.random.default_rng(0), 0.0, 0.0
                for seed in range(5):
                    lengths = np.random.default_rng(seed).lognormal(np.log(1500), 0.9, sequences)
                    lengths = np.minimum(lengths, 8192).astype(int)
                    seconds += rollout(lengths, most, right, rng)
                    plain += rollout(lengths, 0, right, rng)
                found.append({"sequences": sequences, "right": right, "drafts": most, "simulated": True,
                              "seconds": seconds / 5, "plain_seconds": plain / 5, "speedup": plain / seconds})
    return found


def rollout(lengths: np.ndarray, most: int, right: float, rng: np.random.Generator) -> float:
    """Seconds until all are done. Idle rows draft as in bridges.engines.speculate."""
    done, seconds = np.zeros(len(lengths), int), 0.0
    while (live := np.flatnonzero(done < lengths)).size:
        idle = ROWS - live.size
        drafting = most > 0 and 2 * live.size <= ROWS
        seconds += (LAYERS + OUTPUT + OF_TOKEN * done[live].sum()
                    + (DRAFT * most if drafting else 0)) / BANDWIDTH
        lanes = np.minimum(most, (idle + live.size - 1
                                  - np.arange(live.size)) // live.size) if drafting else np.zeros(1, int)
        accepted = np.minimum(rng.geometric(1 - right, live.size) - 1, lanes)
        done[live] += 1 + accepted
    return seconds


if __name__ == "__main__":
    main()
