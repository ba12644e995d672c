"""Rollouts of many lengths by the embedded engine against vLLM, both by their continuous batching: Qwen3
shapes, random weights.

    jaxfp8rl bench engine_rollout [--size 1.7b] [--rows 64] [--new-tokens 2048] [--recipe fp8]

The queue has --queue times as many prompts as the engine decodes at once, of PROMPT tokens each. The length
of a completion is drawn from a log-normal distribution whose median is a third of --new-tokens, and cut
there; no token ends one. Each engine has its own process, one after the other, and gets its weights by a
publish. Rates are of all tokens over the whole rollout, its end with idle rows included. "full" is the rate
of as many completions as rows, all of --new-tokens. vLLM has CUDA graphs and samples without seeds, which is
its fastest way; --fp8-kernel native needs no nvcc.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import MIXTURES, SHAPES, arguments, config, require_gpu, row, size_of, write
from benchmarks.processes import answered, found_by

PROMPT, SPREAD = 128, 0.8  # tokens; of the logarithm of a length
RECIPES = {"fp8": ("fp8_unified", "fp8"), "fp8_bf16_cache": ("fp8_unified", "auto"), "bf16": ("bf16", "auto")}
ENGINES = {"embedded": "jax", "vllm": "vllm"}


def main() -> None:
    parser = arguments(__doc__, "engine_rollout")
    parser.add_argument("--size", choices=[*SHAPES, *MIXTURES], default="1.7b")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--rows", type=int, default=64, help="sequences decoded at once: %(default)s")
    parser.add_argument("--queue", type=int, default=4, help="times as many in all: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=2048, help="of the longest: %(default)s")
    parser.add_argument("--recipe", choices=RECIPES, default="fp8")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--fp8-kernel", choices=["deep_gemm", "native"], default="deep_gemm",
                        help="rollout.fp8_kernel of vLLM: %(default)s")
    parser.add_argument("--anywhere", action="store_true", help="without a GPU, too: to try the script")
    parser.add_argument("--child", nargs=2, metavar=("ENGINE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if answered(args.child, lambda engine: measure(engine, args)):
        return
    require_gpu(__file__, anywhere=args.anywhere)
    found = {name: found_by(__file__, name) for name in args.engines}
    case = f"Qwen3-{size_of(args)}, {args.rows} x {args.new_tokens}, {args.recipe}"
    ours, theirs = found.get("embedded"), found.get("vllm")
    rows = [row(case, metric, "tokens/s", ours[metric], theirs[metric], "vLLM, same run")
            for metric in ("rollout", "full")] if ours and theirs else []
    write(args.out, "engine_rollout", rows, args.plot, each={case: found})


def lengths(count: int, longest: int) -> np.ndarray:
    """[count] int: log-normal with median longest / 3, cut at `longest`."""
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 3), SPREAD, count)
    return np.clip(drawn.astype(int), 1, longest)


def config_of(engine: str, args: argparse.Namespace) -> Any:
    from jaxfp8rl.config.schema import Config

    recipe, cache = RECIPES[args.recipe]
    raw, length = config(args.size, args.layers), PROMPT + args.new_tokens
    token = 2 * raw["num_hidden_layers"] * raw["num_key_value_heads"] * raw["head_dim"] * (1 if cache == "fp8"
                                                                                           else 2)
    vllm: dict[str, Any] = {} if engine != "vllm" else {
        "fp8_kernel": args.fp8_kernel if recipe != "bf16" else "native",
        "kv_cache_gib": round(1.1 * token * length * args.rows / 2**30 + 0.1, 2)}
    return Config.model_validate({
        "run": {"dir": "unused", "steps": 1}, "model": {"config": raw},
        "task": {"kind": "arithmetic", "max_prompt_tokens": PROMPT},
        "rollout": {"engine": ENGINES[engine], "max_new_tokens": args.new_tokens, "max_num_seqs": args.rows,
                    "prompts_per_step": args.rows, "samples_per_prompt": args.queue,
                    "kv_cache": cache, **vllm},
        "precision": {"recipe": recipe, "compute_dtype": "bfloat16", "weight_dtype": "bfloat16"},
        "train": {"row_tokens": length},
    })


def random_engine(cfg: Any) -> tuple[Any, Any, Any]:
    """The engine of a config, with random weights, its model, and its layers' runs."""
    from benchmarks.publish import RandomWeights
    from jaxfp8rl.models.config import ModelConfig
    from jaxfp8rl.policy.shapes import engine_runs
    from jaxfp8rl.rollout.engines import build_engine

    model = ModelConfig.from_hf(cfg.model.config)
    runs = engine_runs(cfg, model)
    engine, transport = build_engine(cfg, model, runs)
    transport.publish(RandomWeights(model, runs), 0)
    return engine, model, runs


def measure(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the start, and tokens a second."""
    from bridges.api import GenRequest, SamplingParams
    from jaxfp8rl.rollout.gpu_memory import share_gpu

    began, cfg = time.perf_counter(), config_of(name, args)
    share_gpu(cfg)
    engine, *_ = random_engine(cfg)
    words = config(args.size)["vocab_size"]
    prompts = np.random.default_rng(1).integers(0, words, (args.rows * args.queue, PROMPT)).tolist()

    def rollout(counts: np.ndarray) -> float:
        requests = [GenRequest(str(i), tuple(prompt), SamplingParams(int(n)))
                    for i, (prompt, n) in enumerate(zip(prompts, counts))]
        start = time.perf_counter()
        groups = engine.generate(requests)
        seconds = time.perf_counter() - start
        seen = [len(g[0].token_ids) for g in groups]
        assert seen == counts[: len(groups)].tolist(), "a completion ended early"
        return seconds

    counts = lengths(len(prompts), args.new_tokens)
    brief = np.full(len(prompts), 8)
    brief[0] = args.new_tokens * 3 // 4 + 1  # of the same shapes
    for batch in brief, brief[: args.rows]:
        rollout(batch)  # what is still to be compiled
    start = time.perf_counter() - began
    whole = rollout(counts)
    full = rollout(np.full(args.rows, args.new_tokens))
    rates = {"rollout": counts.sum() / whole, "full": args.rows * args.new_tokens / full}
    print(f"{name}: there after {start:.1f} s; {rates['rollout']:,.0f} tokens/s, {rates['full']:,.0f} with "
          "rows of one length", flush=True)
    return {"start, s": start, "tokens": int(counts.sum()), "rollout, s": whole, "one length, s": full,
            **rates}


if __name__ == "__main__":
    main()
