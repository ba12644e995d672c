"""How far engine and learner are apart by family, shape and cache, with random weights in FP8; beside it,
how far one rounding moves the learner from itself.

    jaxfp8rl bench mismatch_shapes [--cases llama-1b mistral-7b qwen3-7b]

vLLM samples completions of 24 tokens, and the learner scores them. The yardstick is the same learner with
the first column of its embedding off by a bfloat16's last place (2^-7): one input of a token in thousands.
The shapes are Llama-3.2-1B's and the first 8 layers of Mistral-7B, with Mistral's layers and with Qwen3's.
The vocabulary has 32,000 words.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import MISMATCH, arguments, row, write
from benchmarks.processes import answered, found_by

SHAPES = {  # hidden, intermediate, layers, heads, KV heads, width of a head
    "1b": (2048, 8192, 16, 32, 8, 64), "7b": (4096, 14336, 8, 32, 8, 128),
}
CASES = ("llama-1b", "mistral-7b", "qwen3-7b")
KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim")


def main() -> None:
    parser = arguments(__doc__, "mismatch_shapes")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--caches", nargs="+", choices=["auto", "fp8"], default=["auto", "fp8"])
    parser.add_argument("--child", nargs=3, metavar=("CASE", "CACHE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if answered(args.child, measure):
        return
    rows = []
    for name, cache in [(name, cache) for name in args.cases for cache in args.caches]:
        found = found_by(__file__, name, cache, given=())
        case = f"{name}, cache {'bfloat16' if cache == 'auto' else cache}"
        beside = "the learner, an input moved"
        rows.append(row(case, MISMATCH, "", found["engine"], found["moved"], beside, True))
        write(args.out, "mismatch_shapes", rows, args.plot)


def measure(name: str, cache: str) -> dict[str, float]:
    """The mismatch with the engine, and the learner's with itself after the move: means of exp|d|."""
    import jax
    import numpy as np

    from benchmarks.mirror import sample
    from jaxfp8rl.config.toml import load_config
    from jaxfp8rl.training import publishing
    from jaxfp8rl.training.context import build_run
    from jaxfp8rl.training.step import make_logprobs, make_policy, make_score

    ctx = build_run(load_config("demo", options_of(name, cache)))
    try:
        params = ctx.initial_params()
        publishing.publish(ctx, ctx.policy(params), 0)
        batch = sample(ctx, 256)
        score = make_score(make_logprobs(ctx.model, ctx.precision, 1.0, remat="none"))
        of_embedding = lambda path: "embed" in jax.tree_util.keystr(path)
        moved = jax.tree_util.tree_map_with_path(
            lambda path, w: w.at[:, 0].multiply(1 + 2.0**-7) if of_embedding(path) else w, params)
        own, other = (score(make_policy(ctx.precision)(p), batch) for p in (params, moved))
        apart = lambda a: float(
            np.exp(np.abs(np.asarray(a, np.float64) - np.asarray(own)))[batch.response_mask].mean())
        return {"engine": apart(batch.rollout_logp), "moved": apart(other)}
    finally:
        ctx.close()


def options_of(name: str, cache: str) -> list[str]:
    family, shape = name.split("-")
    model = {**dict(zip(KEYS, SHAPES[shape])), "architectures": f'["{family.capitalize()}ForCausalLM"]',
             "model_type": family, "max_position_embeddings": 512, "vocab_size": 32000}
    of_run = {"rollout.engine": "vllm", "rollout.gpu_memory_utilization": 0.1, "rollout.kv_cache_gib": 2,
              "rollout.kv_cache": cache, "rollout.max_new_tokens": 24, "precision.compute_dtype": "bfloat16",
              "precision.products": "pallas", "precision.attention": "pallas", "train.row_tokens": 512,
              "train.rows_per_microbatch": 1}
    settings = of_run | {f"model.config.{key}": value for key, value in model.items()}
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


if __name__ == "__main__":
    main()
