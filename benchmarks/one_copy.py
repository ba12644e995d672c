"""The memory that rollout.one_copy saves, on one GPU: two updates with the codes only in vLLM's memory, and
with a second copy in the learner.

    jaxfp8rl bench one_copy

Qwen3-0.6B's shape, random weights, the demo's task, each mode in its own process. Memory is the memory in use
of JAX's allocator after a publish, and its peak. Scores are compared bit for bit in two ways. In the process
with one copy, after the updates, they are compared with those of a policy that has its own codes, made of the
same weights. Between processes, the comparison is controlled by two processes with two copies each. The
yardstick is two copies.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, row, write
from benchmarks.processes import answered, found_by
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.models.hf_names import param_table
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.publish.wire import is_fp8
from jaxfp8rl.rollout.scored_groups import make_requests
from jaxfp8rl.training import publishing
from jaxfp8rl.training.context import build_run
from jaxfp8rl.training.step import make_policy
from jaxfp8rl.training.update_batches import pack_samples

SHAPE = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
         "num_key_value_heads": 8, "head_dim": 128}
OPTIONS = [
    "--rollout.engine", "vllm", "--rollout.publish", "in_place", "--rollout.gpu_memory_utilization", "0.1",
    "--rollout.kv_cache_gib", "1", "--precision.compute_dtype", "bfloat16", "--run.dir", "unused",
    "--sft.steps", "0",
    # what compiles soonest: that codes in an engine under CUDA graphs can be shared is
    # tests/gpu/test_vllm_inplace.py's
    "--rollout.max_num_seqs", "32", "--precision.products", "float32", "--rollout.enforce_eager", "true",
]
# Two processes that tune their products independently would sum in different orders.
SAME_SUMS = "--xla_gpu_autotune_level=0"


def main() -> None:
    parser = arguments(__doc__, "one_copy")
    parser.add_argument("--child", nargs=2, metavar=("OF", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if answered(args.child, lambda of: two_updates(*json.loads(of))):
        return
    wide = [w for k, v in SHAPE.items() for w in (f"--model.config.{k}", str(v))]
    with ThreadPoolExecutor() as pool:  # concurrently, which affects neither memory nor bits
        one, two, again = pool.map(lambda one_copy: in_child(one_copy, wide), (True, False, False))
    rows = [row("Qwen3-0.6B", f"{what} memory of the learner", "GB", one[key] / 1e9, two[key] / 1e9,
                "two copies", True)
            for what, key in (("resting", "in_use"), ("peak", "peak"))]
    saved, apart = two["in_use"] - one["in_use"], "between processes, two copies and"
    bits = {"scores by the engine's codes and by the learner's own": one["as_own"],
            f"{apart} one": equal(one, two),
            f"{apart} two": equal(two, again)}
    write(args.out, "one_copy", rows, args.plot, codes_bytes=one["codes"], saved=saved, equal_to_the_bit=bits)
    print(f"codes {one['codes']:,} bytes, saved {saved:,}; equal to the bit: {bits}")


def in_child(one_copy: bool, options: list[str]) -> dict:
    """`two_updates` in its own process."""
    return found_by(__file__, json.dumps([one_copy, options]), given=(),
                    environment={"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {SAME_SUMS}"})


def equal(a: dict, b: dict) -> dict[str, str]:
    """For each kind of number, how many of the arrays are equal."""
    return {
        what: f"{sum(x == y for x, y in zip(a['digests'][what], b['digests'][what]))} of "
              f"{len(b['digests'][what])}"
        for what in a["digests"]}


def two_updates(one_copy: bool, options: list[str]) -> dict:
    """Digests of the scores, of the published weights and of the engine's completions; whether scores equal
    those from the learner's own codes; bytes."""
    cfg = load_config("demo", [*OPTIONS, "--rollout.one_copy", str(one_copy).lower(), *options])
    with contextlib.closing(build_run(cfg)) as ctx:
        params = jax.tree.map(lambda w: 4 * w if jnp.std(w) > 0 else w, ctx.initial_params())
        state = init_state(params, ctx.optimizer, ctx.precision.compute_dtype)
        _, policy = publishing.sync_weights(ctx, state, ctx.policy(state.params), 0)
        del params
        digests = {"scores": [], "weights": [], "the engine's": []}
        logp = np.full(3, -2.0, np.float32)
        samples = [Sample(p.token_ids, (1, 2, 3), logp, 1.0 - i % 2) for i, p in enumerate(ctx.train[:512])]
        batch = pack_samples(ctx, samples)
        for version in (1, 2, 3):
            old = ctx.score(policy, batch)
            digests["scores"].append(digest(old))
            if version < 3:
                state, policy, _ = ctx.train_step(state, policy, batch, old)
                _, policy = publishing.sync_weights(ctx, state, policy, version)
                digests["weights"] += map(digest, jax.tree.leaves(state.params))
        del old
        gc.collect()
        stats = jax.local_devices()[0].memory_stats() or {"bytes_in_use": 0, "peak_bytes_in_use": 0}
        codes = sum(int(np.prod(e.shape)) for e in param_table(ctx.model) if is_fp8(e, ctx.runs))
        own = make_policy(ctx.precision)(state.params)
        as_own = digest(ctx.score(own, batch)) == digests["scores"][-1]
        generated = ctx.engine.generate(make_requests(ctx.train[:16], ctx.sampling, 4, seed=1, step=3))
        digests["the engine's"] += [digest(c.logprobs) for completions in generated for c in completions]
    return {"digests": digests, "as_own": as_own, "in_use": stats["bytes_in_use"],
            "peak": stats["peak_bytes_in_use"],
            "codes": codes}


def digest(x: jax.Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()


if __name__ == "__main__":
    main()
