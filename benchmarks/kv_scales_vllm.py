"""Scales of FP8 attention in vLLM on one GPU, compiled and under CUDA graphs: learner and engine at equal
weights.

    jaxfp8rl bench kv_scales_vllm [--samples 512]

The models are random, with and without query/key norm. An eighth of their keys' channels is a thousand times
as large as the rest, and the queries' are smaller by the same factor. BF16 attention is therefore unchanged,
while E4M3 at scale 1 clips keys at 448 and loses queries below 2^-10. The engine's samples are scored by the
learner that mirrors it ("mirrored") and by one whose attention is BF16 ("BF16 attention"), which shows the
effect of the engine's rounding on the policy. The yardstick is the same engine at scale 1. Each engine has
its own process. Finally a training step is timed, with the share that calibration takes.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, clocked, row, write
from benchmarks.mirror import sample
from benchmarks.processes import answered
from bridges.transports.vllm_choice import open_vllm_transport
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.kv_scales import NAMES
from jaxfp8rl.run.run_directory import RunDirectory
from jaxfp8rl.run.signals import StopSignals
from jaxfp8rl.training import loop, publishing, start
from jaxfp8rl.training.context import RunContext, build_run
from jaxfp8rl.training.step import make_logprobs, make_score
from jaxfp8rl.types import Params

MODEL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
NORMS = {"query/key norm": [], "no query/key norm": ["--model.config.architectures", '["LlamaForCausalLM"]',
                                                     "--model.config.model_type", "llama"]}
CACHES = {"FP8": ["--rollout.kv_cache", "fp8", "--rollout.kv_scales", "calibrated"],
          "BF16": ["--rollout.kv_cache", "auto"]}
COMMON = [
    *(w for k, v in MODEL.items() for w in (f"--model.config.{k}", str(v))), "--precision.compute_dtype",
    "bfloat16",
    "--rollout.engine", "vllm", "--rollout.gpu_memory_utilization", "0.1", "--rollout.kv_cache_gib", "2",
    "--rollout.max_num_seqs", "64", "--rollout.max_new_tokens", "24", "--run.dir", "unused", "--sft.steps",
    "0",
]
LOUD = 1024.0
STEPS = 4
# Qwen3-0.6B's shape except for its vocabulary. The reward is for ending early, which random weights do
# occasionally, so that there is a gradient and every update is applied. The learning rate is so small that
# the weights stay random: at the demo's rate, two updates learn the task.
STEP = {
    "model.config.hidden_size": 1024, "model.config.intermediate_size": 3072,
    "model.config.num_hidden_layers": 28,
    "model.config.num_attention_heads": 16, "model.config.num_key_value_heads": 8,
    "model.config.head_dim": 128,
    "model.config.max_position_embeddings": 1024, "rollout.prompts_per_step": 16,
    "rollout.max_new_tokens": 512,
    "loss.overlong_buffer": 512, "precision.attention": "auto", "train.row_tokens": 4096,
    "train.rows_per_microbatch": 2,
    "train.remat": "mlp", "optim.lr": 1e-7,
}


def main() -> None:
    parser = arguments(__doc__, "kv_scales_h200")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--child", nargs=3, metavar=("NORM", "CACHE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    find = lambda norm, cache: timed_step() if cache == "step" else measure(norm, cache, args.samples)
    if not answered(args.child, find):
        run_all(args)


def run_all(args) -> None:
    folder = Path(tempfile.mkdtemp())

    def child(norm: str, cache: str) -> dict | None:
        out = folder / f"{norm[:2]}{cache}.json"
        subprocess.run([sys.executable, __file__, "--child", norm, cache, str(out), "--samples",
                        str(args.samples)])
        return json.loads(out.read_text()) if out.exists() else None

    cases = [(norm, cache) for norm in NORMS for cache in CACHES]
    with ThreadPoolExecutor(len(cases)) as pool:
        found = dict(zip(cases, pool.map(lambda case: child(*case), cases)))
    rows = []
    for (norm, _), result in found.items():
        one = (found[norm, "FP8"] or {}).get("scale 1, in place")
        for what, learners in (result or {}).items():
            for learner, gaps in learners.items():
                rows += [row(f"{norm}, {what}: {learner}", metric, "", x, one and one[learner][metric],
                             "scale 1", True)
                         for metric, x in gaps.items() if one]
    problems = [case for case, result in found.items() if not result]
    write(args.out, "kv_scales_h200", rows, problems=problems)
    step = child("", "step") or {}
    problems += [] if step else ["step"]
    rows += [row("a step of Qwen3-0.6B's shape", f"calibrating, {name}", "s", step[name], step["step"],
                 "the whole step", True)
             for name in ("score", "apply") if step]
    write(args.out, "kv_scales_h200", rows, args.plot, step=step, problems=problems)
    if problems:
        sys.exit(f"these failed, see above: {problems}")


def measure(norm: str, cache: str, samples: int) -> dict[str, dict[str, dict[str, float]]]:
    """(values and publish method) -> learner -> gaps."""
    with contextlib.closing(build_run(load_config("demo", [*COMMON, *NORMS[norm], *CACHES[cache]]))) as ctx:
        in_bf16 = dataclasses.replace(ctx.precision.kv, fp8=False, attention_fp8=False)
        plain = dataclasses.replace(ctx.precision, kv=in_bf16)
        mirrored = ctx.kv_scales.score if ctx.kv_scales else ctx.score  # scores as a step does
        learners = {"mirrored": mirrored,
                    "BF16 attention": make_score(make_logprobs(ctx.model, plain, 1.0, remat="none"))}
        policy = ctx.policy(with_outliers(ctx.model, ctx.initial_params()))
        if cache == "BF16":
            return {"BF16 cache": published(ctx, learners, policy, samples)}
        unit = policy | {"kv_scales": {name: jnp.ones(ctx.model.num_hidden_layers) for name in NAMES}}
        calibrated = publishing.with_scales(ctx, unit)
        found = {f"{what}, in place": published(ctx, learners, p, samples)
                 for what, p in (("calibrated", calibrated), ("scale 1", unit))}
        ctx.transport = open_vllm_transport("reload", ctx.engine)
        return found | {"calibrated, reload": published(ctx, learners, calibrated, samples)}


def with_outliers(model: ModelConfig, params: Params) -> Params:
    """Wide random weights. Every eighth channel of the keys is larger by LOUD, and of the queries smaller;
    both halves of a rotated pair change alike, so that their products are unchanged."""
    params = jax.tree.map(lambda w: 4 * w if jnp.std(w) > 0 else w, params)
    attention = params["layers"]["self_attn"]
    channel = jnp.where(jnp.arange(model.head_dim // 2) % 8 == 0, LOUD, 1.0)
    factor = jnp.concatenate([channel, channel])
    for name, f in (("q", 1 / factor), ("k", factor)):
        if model.family.qk_norm:
            attention[f"{name}_norm"]["weight"] *= f
        else:
            heads = attention[f"{name}_proj"]["weight"].shape[1] // model.head_dim
            attention[f"{name}_proj"]["weight"] *= jnp.tile(f, heads)[:, None]
    return params


def published(ctx: RunContext, learners: dict[str, Callable], policy: Params,
              samples: int) -> dict[str, dict[str, float]]:
    """Publish, sample, score: learner -> gaps."""
    publishing.publish(ctx, policy, 0)
    batch = sample(ctx, samples)
    return {name: gaps(score(policy, batch), batch) for name, score in learners.items()}


def gaps(logp: jax.Array, batch) -> dict[str, float]:
    """Statistics over response tokens, in nats."""
    d = (np.asarray(logp)
         - np.asarray(batch.rollout_logp))[np.asarray(batch.response_mask)].astype(np.float64)
    apart, k3 = np.abs(d), np.expm1(d) - d
    return {"abs_logp_diff": float(apart.mean()), "k3": float(k3.mean()), "max_logp_diff": float(apart.max()),
            "off by more than 1e-5": float((apart > 1e-5).mean())}


def timed_step() -> dict[str, float]:
    """Seconds of a whole step (median), and of calibration: the increase of the scoring pass, and the
    computation of the scales."""
    options = [*COMMON, *CACHES["FP8"], *(w for k, v in STEP.items() for w in (f"--{k}", str(v)))]
    with tempfile.TemporaryDirectory() as folder:
        cfg = load_config("demo", [*options, "--run.dir", folder + "/run"])
        with contextlib.closing(build_run(cfg)) as ctx, RunDirectory(cfg, False) as run, StopSignals(
                ) as stop:
            state = start.init_train_state(ctx, run, stop)
            policy, steps = publishing.with_scales(ctx, ctx.policy(state.params)), []
            publishing.publish(ctx, policy, 0)
            for step in range(1, STEPS + 1):
                state, policy, metrics, _ = loop.one_step(ctx, run, state, policy, step)
                assert metrics["update/applied"] == 1, "the timed step applied no update"
                steps.append(metrics)
            batch = sample(ctx, cfg.rollout.prompts_per_step * cfg.rollout.samples_per_prompt, STEPS)
            plain, seen = (median_seconds(lambda s=s: s(policy, batch))
                           for s in (ctx.score, ctx.kv_scales.score))
            apply = median_seconds(lambda: ctx.kv_scales.apply(policy)["kv_scales"])
    medians = {key: statistics.median(m[key] for m in steps[1:]) for key in steps[0]
               if key.startswith("time/")}
    return {"step": medians["time/step_s"], "score": seen - plain, "apply": apply, "plain score": plain,
            **medians}


def median_seconds(f: Callable, count: int = 12) -> float:
    return statistics.median([clocked(f) for _ in range(count)][2:])


if __name__ == "__main__":
    main()
