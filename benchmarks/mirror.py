"""The value of each rounding that the learner mirrors: samples of the engine, scored by learners that differ
in one rounding.

    jaxfp8rl bench mirror [--samples 4096] [--cpu]

The demo's warm start is published to vLLM and sampled, in a separate process for each case. The same tokens
are then scored by the learner that mirrors the engine (`resolve`), and by learners that differ from it in one
respect. The yardstick of a row is the full mirror: a ratio of 0.5 means that the change doubles the gap.
`--cpu`: vLLM's CPU build, not compiled, with the FP8 kernel that `make demo-vllm` uses here; the result is
mirror_cpu.json.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, demo_from, opened, row, write
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.training import publishing
from jaxfp8rl.training.context import RunContext
from jaxfp8rl.training.step import make_logprobs, make_policy, make_score
from jaxfp8rl.training.update_batches import pack_samples

CASES = {
    "bf16, BF16 KV": "--precision.recipe bf16 --rollout.kv_cache auto",
    "fp8_unified, BF16 KV": "--rollout.kv_cache auto",
    "fp8_unified, FP8 KV": "--rollout.kv_cache fp8",
    "fp8_unified, BF16 KV, engine not compiled": "--rollout.kv_cache auto --rollout.enforce_eager true",
}
CPU_CASES = {"fp8_unified, BF16 KV": "--rollout.kv_cache auto", "fp8_unified, FP8 KV": ""}
ENGINE = ("--precision.compute_dtype bfloat16 --rollout.engine vllm --rollout.gpu_memory_utilization 0.08 "
          "--rollout.kv_cache_gib 4")


def main() -> None:
    parser = arguments(__doc__, "mirror")
    parser.add_argument("--cpu", action="store_true", help="vLLM's CPU build")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--options", default="",
                        help="more overrides of the config, as `jaxfp8rl train` takes them")
    parser.add_argument("--jobs", type=int,
                        help="number of concurrent cases; default: all on a GPU, one on a CPU")
    parser.add_argument("--child", nargs=3, metavar=("CONFIG", "OPTIONS", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        measure(*args.child, args.samples)
    else:
        run_all(args)


def run_all(args) -> None:
    cases, engine, name = (CPU_CASES, cpu_engine(), "mirror_cpu") if args.cpu else (CASES, ENGINE, "mirror")
    folder = Path(tempfile.mkdtemp())
    words = ["sft", "demo", "--precision.recipe", "bf16", "--precision.compute_dtype", "bfloat16",
             "--run.dir", str(folder / "sft")]
    subprocess.run([sys.executable, "-m", "jaxfp8rl", *words], check=True)
    (folder / "demo.toml").write_text(demo_from(folder / "sft" / "sft"))

    def one(case: tuple[int, str]) -> dict | None:
        index, options = case
        out = folder / f"{index}.json"
        options = f"{engine} --run.dir {folder / 'unused'} {options} {args.options}"
        words = ["--child", str(folder / "demo.toml"), options, str(out), "--samples", str(args.samples)]
        subprocess.run([sys.executable, __file__, *words])
        return json.loads(out.read_text()) if out.exists() else None

    with ThreadPoolExecutor(args.jobs or (1 if args.cpu else len(cases))) as pool:
        found = dict(zip(cases, pool.map(one, enumerate(cases.values()))))
    rows = [
        row(f"{case}: {name}", key, "over response tokens", value, result["gaps"]["mirrored"][key],
        "mirrored in full", True)
        for case, result in found.items() if result
        for name, values in result["gaps"].items() for key, value in values.items()
    ]
    formats = {case: result and result["formats"] for case, result in found.items()}
    problems = [case for case, result in found.items() if not result]
    out = Path(args.out).with_name(f"{name}.json") if args.cpu else args.out
    write(out, name, rows, args.plot, samples=args.samples, formats=formats, problems=problems)


def cpu_engine() -> str:
    from bridges.probe import vllm_demo_flags

    return shlex.join(["--precision.compute_dtype", "bfloat16", "--rollout.engine", "vllm",
                       *vllm_demo_flags()])


def measure(config: str, options: str, out: str, samples: int) -> None:
    with opened(load_config(config, shlex.split(options))) as ctx:
        params = ctx.initial_params()
        publishing.publish(ctx, ctx.policy(params), 0)
        batch, formats = sample(ctx, samples), ctx.engine.capabilities().formats
        found = {name: gaps(ctx, params, batch, precision)
                 for name, precision in variants(ctx.precision).items()}
    Path(out).write_text(json.dumps({"formats": dataclasses.asdict(formats), "gaps": found}))


def variants(full: Precision) -> dict[str, Precision]:
    """The learner that mirrors the engine, and learners that differ in one respect. Changes without an effect
    are left out."""
    plain = tuple(dataclasses.replace(run, fp8=frozenset()) for run in full.runs)
    kv = lambda **changes: {"kv": dataclasses.replace(full.kv, **changes)}
    rounding = lambda **changes: {"rounding": dataclasses.replace(full.rounding, **changes)}
    high = kv(fp8=False, attention_fp8=False)
    changes = {
        "FP8 products summed in float32": {"products": "float32"},
        "norms and SiLU rounded as if not fused": rounding(fused=False, fused_quantizer=False,
                                                            residual_once=False),
        "residual rounded after attention, too": rounding(residual_once=False),
        "norms and SiLU as if fused": rounding(fused=True),
        "norms see the sum rounded": rounding(unrounded_sums=False),
        "probabilities in the type of the values": kv(probabilities=None),
        "quantiser apart from norms and SiLU": rounding(fused_quantizer=False),
        "rotary table in float32": rounding(rope_dtype="float32"),
        "logits in float32": rounding(logits_dtype="float32"),
        "keys, values, queries, probabilities not FP8": high,
        "keys, values rounded to nearest": kv(truncated=False),
        "queries, probabilities not FP8": kv(attention_fp8=False),
        "no FP8 at all": {"runs": plain} | high | rounding(fused_quantizer=False),
        "everything but FP8 in float32": {"compute_dtype": "float32"},
    }
    changed = {name: dataclasses.replace(full, **change) for name, change in changes.items()}
    if not full.any_fp8:  # then its fields have no effect
        del changed["FP8 products summed in float32"]
    return {"mirrored": full} | {name: precision for name, precision in changed.items() if precision != full}


def sample(ctx: RunContext, count: int, version: int = 0):
    """`count` completions of the training prompts by weights of `version`, packed, with their routes if these
    are replayed."""
    prompts = (ctx.train * (count // len(ctx.train) + 1))[: max(1, count // 4)]
    kept, _ = scored_groups.generate(ctx.engine, prompts,
                                     scored_groups.make_requests(prompts, ctx.sampling, 4, 7, 5), version)
    return pack_samples(
        ctx, [Sample(p.token_ids, c.token_ids, c.logprobs, 0.0, routes=c.routed_experts) for p, cs in kept
                for c in cs]
    )


def gaps(ctx: RunContext, params, batch, precision: Precision) -> dict[str, float]:
    """How far the learner of `precision` lies from the engine, as `apart_by` measures it."""
    cfg = ctx.cfg
    score = make_score(make_logprobs(ctx.model, precision, cfg.rollout.temperature, cfg.train.remat))
    return apart_by(score(make_policy(precision)(params), batch), batch)


def apart_by(logp: jax.Array, batch) -> dict[str, float]:
    """How far `logp` lies from the engine's: means over response tokens of |d|, of k3, of exp|d| and of the
    share with |d| > 1e-5, and the largest |d|; d in nats."""
    logp, rollout = np.asarray(jax.device_get(logp)), np.asarray(batch.rollout_logp)
    d = (logp - rollout)[np.asarray(batch.response_mask)].astype(np.float64)
    apart = np.abs(d)
    return {"abs_logp_diff": float(apart.mean()), "k3": float((np.expm1(d) - d).mean()),
            "max_logp_diff": float(apart.max()), "token_mult_prob_error": float(np.exp(apart).mean()),
            "off by more than 1e-5": float((apart > 1e-5).mean())}


if __name__ == "__main__":
    main()
