"""Is the learner's score the embedded engine's log-probability, in every bit, and what does that cost? Qwen3
shapes, random weights, precision.exact = "engine" beside "off".

    jaxfp8rl bench one_policy [--size 1.7b] [--layers 4] [--rows 256] [--queue 10] [--new-tokens 1024]
    jaxfp8rl bench one_policy --trained [--tokens 1000000]    # the demo, CPU; more than half an hour

The engine samples --queue completions for each row, of log-normal lengths and of groups of 4 that share a
prompt, so that rows are refilled and pages shared. The learner scores all of them, packed. "equal" is the
share of tokens whose log-probability has the same bits, k3 the mean of exp(d) - d - 1 of their differences.
Rates are of sampled tokens.

--trained: the demo's model after its warm start, at each number of ROWS and in each of FORMATS. Half of the
completions are asked for at once, and half arrive while others are decoded; their lengths differ, so that
rows are refilled, and the cache of some is too small, so that sequences are put out. Counted are --tokens of
the first format and a fifth of them of each other, on a CPU. The result is one_policy_trained.json.

Needs a Hopper GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
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
ROWS = {1: 0.02, 8: 0.08, 64: 0.3, 256: 0.6}  # decoded at once, and the share of the tokens
FEW_PAGES = 8  # rows whose cache is too small
LONGEST, ASKED = 40, 32  # tokens of a completion, and prompts of a call
IN_BF16 = ("--rollout.kv_cache", "auto", "--precision.compute_dtype", "bfloat16")
MIXTURE = ("--model.config.architectures", '["Qwen3MoeForCausalLM"]', "--model.config.model_type",
           "qwen3_moe", "--model.config.num_experts", "4", "--model.config.num_experts_per_tok", "2",
           "--model.config.moe_intermediate_size", "128", "--model.config.decoder_sparse_step", "1",
           "--model.config.mlp_only_layers", "[]", "--model.config.norm_topk_prob", "true")
FORMATS = {"FP8": (), "FP8, BF16 cache": IN_BF16, "BF16": ("--precision.recipe", "bf16", *IN_BF16),
           "a mixture in FP8": MIXTURE}


def main() -> None:
    parser = arguments(__doc__, "one_policy")
    parser.add_argument("--size", choices=SHAPES, default="1.7b")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--rows", type=int, default=256, help="decoded at once: %(default)s")
    parser.add_argument("--queue", type=int, default=10, help="completions a row: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=1024, help="of the longest: %(default)s")
    parser.add_argument("--row-tokens", type=int, default=16384, help="of the learner's rows: %(default)s")
    parser.add_argument("--recipe", choices=[name for name in RECIPES if name != "bf16"], default="fp8")
    parser.add_argument("--trained", action="store_true", help="the demo's model, after its warm start")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of --trained: %(default)s")
    parser.add_argument("--anywhere", action="store_true", help="without a GPU, too: to try the script")
    args = parser.parse_args()
    if args.trained:
        return trained(args)
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


def trained(args: argparse.Namespace) -> None:
    """Count tokens of the demo's trained model, in all FORMATS."""
    rows, each = [], {}
    for i, name in enumerate(FORMATS):
        wanted = args.tokens if i == 0 else args.tokens // 5
        params = learned(name)
        ours = counted(name, params, "engine", wanted)
        theirs = counted(name, params, "off", wanted // 20)
        case = f"the demo, trained, {min(ROWS)} to {max(ROWS)} rows, {name}"
        rows += [row(case, "equal", "of tokens", ours["equal"], theirs["equal"], 'precision.exact = "off"'),
                 row(case, "k3", "nats", ours["k3"], theirs["k3"], 'precision.exact = "off"', True)]
        each[case] = {"engine": ours, "off": theirs}
        write(args.out.with_stem(f"{args.out.stem}_trained"), "one_policy", rows, args.plot, each=each)


def run_of(name: str, exact: str, rows: int) -> Any:
    """The context of a run of the demo in this format, whose engine decodes so many rows at once."""
    from jaxfp8rl.config.toml import load_config
    from jaxfp8rl.training.context import build_run

    return build_run(load_config("demo", [
        "--run.dir", "unused", *FORMATS[name], "--precision.exact", exact,
        "--rollout.prompts_per_step", str(ASKED), "--rollout.samples_per_prompt", str(GROUP),
        "--rollout.max_num_seqs", str(rows), "--rollout.max_new_tokens", str(LONGEST),
        "--rollout.temperature", str(TEMPERATURE),
        "--train.row_tokens", "92", "--train.rows_per_microbatch", "16", "--sft.steps", "300"]))


def learned(name: str) -> Any:
    """The demo's parameters in this format after its warm start."""
    from jaxfp8rl.training.warm_start import warm_start

    ctx = run_of(name, "off", 8)
    data = ctx.task, ctx.train, ctx.tokenizer
    params, _ = warm_start(ctx.cfg, ctx.model, ctx.initial_params(), data, print, lambda step: None,
                           ctx.engine.capabilities().formats)
    return params


def counted(name: str, params: Any, exact: str, tokens: int) -> dict[str, Any]:
    """Of at least so many tokens: the share with the same bits, k3, and the tokens of each number of rows."""
    from jaxfp8rl.training import publishing
    from jaxfp8rl.training.update_batches import pack_samples

    apart, said, number, same = [], [], {}, 0
    for rows, share in ROWS.items():
        ctx = run_of(name, exact, rows)
        if rows == FEW_PAGES:
            ctx.engine._flights._pages = rows * 2 + 4
        policy = ctx.policy(params)
        publishing.publish(ctx, policy, 1)
        seed = number[rows] = 0
        while number[rows] < share * tokens:
            batch = pack_samples(ctx, drawn(ctx, seed, at_once=seed % 2 == 0))
            live, seed = np.asarray(batch.response_mask), seed + 1
            engine, learner = batch.rollout_logp[live], np.asarray(ctx.score(policy, batch))[live]
            same += int((engine.view(np.int32) == learner.view(np.int32)).sum())
            apart.append((learner - engine).astype(np.float64))
            said.append(engine)
            number[rows] += len(engine)
        print(f'{name}, exact "{exact}", {rows} rows: {number[rows]:,} tokens', flush=True)
        ctx.close()
    d = np.concatenate(apart)
    return {"tokens": len(d), "by_rows": number, "equal": same / len(d),
            "k3": float(np.mean(np.expm1(d) - d)), "largest": float(np.abs(d).max()),
            "spread_of_logp": float(np.std(np.concatenate(said)))}


def drawn(ctx: Any, seed: int, at_once: bool) -> list:
    """Samples of ASKED prompts, GROUP completions each, of 1 to LONGEST tokens."""
    from bridges.api import GenRequest
    from jaxfp8rl.data.packing import Sample

    rng = np.random.default_rng(seed)
    prompts = [ctx.train[i].token_ids for i in rng.integers(len(ctx.train), size=ASKED)]
    asked = [GenRequest(str(i), p, dataclasses.replace(ctx.sampling, max_tokens=int(n), stop_token_ids=()),
                        GROUP, seed=seed * ASKED + i)
             for i, (p, n) in enumerate(zip(prompts, rng.integers(1, LONGEST + 1, ASKED)))]
    if at_once:
        groups = ctx.engine.generate(asked)
    else:
        groups = []
        for some in itertools.batched(asked, 3):
            ctx.engine.submit(some)
            groups += ctx.engine.poll()
        while len(groups) < len(asked):
            groups += ctx.engine.poll()
    return [Sample(prompts[int(c.request_id)], c.token_ids, c.logprobs, 0.0) for g in groups for c in g]


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
