"""Whole GRPO steps, all parameters, learner and vLLM on one GPU: the shapes of published models, random
weights, long completions.

    jaxfp8rl bench grpo [--size 8b] [--steps 3] [--new-tokens 4096] [--gpus 0 1]

Two runs of `jaxfp8rl train`, each in its own process: "fp8", recipe fp8_unified with an FP8 cache, and
"bf16", the yardstick. With --gpus they run at the same time, each on its own GPU; otherwise one after the
other. A model with random weights ends a completion at one of 24 tokens of its vocabulary and is rewarded for
ending early, so lengths and rewards vary as in a real run. Phases are medians over the steps after the
first, which compiles. The peak is that of JAX's allocator, next to the plan that `--dry-run` prints; "device"
is the memory in use according to the driver, learner and engine together, sampled twice a second.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import presets
from benchmarks.common import MISMATCH, SHAPES, arguments, config, require_gpu, row, write
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import dump_config
from jaxfp8rl.data.random_tokenizer import random_tokenizer
from jaxfp8rl.memory.plan import memory_plan
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.known import KNOWN

PROMPTS, SAMPLES, PROMPT = 8, 8, 32
RECIPES = {"fp8": ("fp8_unified", "fp8"), "bf16": ("bf16", "auto")}
PHASES = ("step", "rollout", "score", "update", "publish")
RATES = ("step", "rollout", "score", "update")


def main() -> None:
    parser = arguments(__doc__, "grpo")
    parser.add_argument("--size", choices=[*SHAPES, *KNOWN], default="8b",
                        help="of Qwen3, or the name of a model: %(default)s")
    parser.add_argument("--layers", type=int, default=0, help="of the model; default: all")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=4096)
    parser.add_argument("--runs", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--remat", default="mlp", help="train.remat: %(default)s")
    parser.add_argument("--fp8-kernel", default="deep_gemm",
                        help="rollout.fp8_kernel of the FP8 run: %(default)s")
    parser.add_argument("--wgrad-inputs", choices=["1x128", "128x128"], default="1x128",
                        help="of the FP8 run: %(default)s")
    parser.add_argument("--old-policy", choices=["recomputed", "current"], default="recomputed",
                        help="loss.old_policy")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds of a run")
    parser.add_argument("--gpus", nargs="+", help="of each run, as CUDA_VISIBLE_DEVICES has them")
    args = parser.parse_args()
    require_gpu(__file__)
    with tempfile.TemporaryDirectory() as folder:
        gpus = args.gpus or [os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]] * len(args.runs)
        runs = {name: Run(name, gpu, Path(folder, name), args) for name, gpu in zip(args.runs, gpus)}
        for run in runs.values():
            run.start()
            if not args.gpus:
                run.join()
        for run in runs.values():
            run.join()
    found = {name: run.found() for name, run in runs.items()}
    name = args.size if args.size in KNOWN else f"Qwen3-{args.size.upper()}"
    name += f", {args.layers} layers" if args.layers else ""
    case = f"{name}, {PROMPTS * SAMPLES} completions of up to {args.new_tokens} tokens"
    write(args.out, "grpo", rows_of(case, found), args.plot, runs={
        name: {**f, "config": dump_config(runs[name].cfg)} for name, f in found.items()
    })
    sys.exit(max(run.code for run in runs.values()))


def shape(size: str, layers: int) -> dict:
    """The config.json of a size of Qwen3 or of a known model, its first `layers` alone unless 0."""
    if size not in KNOWN:
        return config(size, layers)
    raw = dict(KNOWN[size])
    if layers:
        raw["num_hidden_layers"] = layers
        raw |= {"layer_types": raw["layer_types"][:layers]} if raw.get("layer_types") else {}
    return raw


def config_of(recipe: str, args, folder: Path) -> Config:
    raw, length = shape(args.size, args.layers), PROMPT + args.new_tokens
    model = ModelConfig.from_hf(raw)
    weights, cache = RECIPES[recipe]
    numbers = model.num_hidden_layers * model.num_key_value_heads * model.head_dim
    token = 2 * numbers * (1 if cache == "fp8" else 2)
    random_tokenizer(model.vocab_size).save(str(folder))
    return Config.model_validate({
        "run": {"dir": str(folder / "run"), "steps": args.steps, "eval_every": 0, "save_every": 0},
        "model": {"config": {k: v for k, v in raw.items() if v is not None},
                  "tokenizer": str(folder)},
        "task": {"kind": "arithmetic", "max_prompt_tokens": PROMPT, "options": {"held_out_fraction": 0.0}},
        "rollout": {
            "engine": "vllm", "prompts_per_step": PROMPTS, "samples_per_prompt": SAMPLES,
            "max_new_tokens": args.new_tokens,
            "max_num_seqs": PROMPTS * SAMPLES, "kv_cache": cache, "sleep": "drop_weights",
            "fp8_kernel": args.fp8_kernel if recipe == "fp8" else "native",
            "kv_cache_gib": round(1.05 * token * length * PROMPTS * SAMPLES / 2**30, 2),
        },
        "precision": {"recipe": weights, "wgrad_inputs": args.wgrad_inputs if recipe == "fp8" else "1x128"},
        "loss": {"overlong_buffer": args.new_tokens, "old_policy": args.old_policy},
        "optim": {"master": "bfloat16", "first_moment": "float8", "second_moment": "bfloat16"},
        "train": {"row_tokens": 4 * length, "rows_per_microbatch": 1, "remat": args.remat},
        # with random weights, rounding errors grow from layer to layer
        "gate": {"completions": 4, "max_mean_gap": 1.0, "max_gap": 10.0},
    })


class Run(threading.Thread):
    """`jaxfp8rl train` in its own process, and the driver's figures for its GPU meanwhile."""

    def __init__(self, name: str, gpu: str, folder: Path, args):
        super().__init__()
        self.cfg, self.gpu, self.folder, self.timeout = config_of(
            name, args, folder), gpu, folder, args.timeout
        self.log, self.seen, self.code = args.out.with_name(f"{args.out.stem}_{name}.log"), None, 1

    def run(self) -> None:
        path = self.folder / "config.toml"
        path.write_text(dump_config(self.cfg))
        command = ["env", f"CUDA_VISIBLE_DEVICES={self.gpu}", sys.executable, "-m", "jaxfp8rl", "train",
                   str(path)]
        self.seen = presets.run(command, Path(self.cfg.run.dir), self.timeout,
                                lambda: presets.in_use(self.gpu), self.log)
        self.code = abs(self.seen.code)

    def found(self) -> dict:
        plan = dict(memory_plan(self.cfg, ModelConfig.from_hf(self.cfg.model.config)))
        assert self.seen
        return {"exit code": self.code, "steps": self.seen.records,
                "device, GB": self.seen.device * 2**20 / 1e9, "plan": plan}


def rows_of(case: str, found: dict[str, dict]) -> list[dict]:
    """Rows against bf16, if that got beyond its first step; otherwise each phase against the whole step."""
    # the first line is that of step 0
    steps = {name: f["steps"][2:] for name, f in found.items() if f["steps"][2:]}
    median = {name: {p: statistics.median(s[f"time/{p}_s"] for s in seen) for p in PHASES}
              for name, seen in steps.items()}
    # each run samples different completions
    tokens = {name: sum(s["tokens/rollout"] for s in seen) for name, seen in steps.items()}
    rate = {name: {p: tokens[name] / sum(s[f"time/{p}_s"] for s in seen) for p in RATES}
            for name, seen in steps.items()}
    rows = []
    for name, of in median.items():
        what, beside = f"{case}, {name}", "bf16" if "bf16" in median else "the step"
        rows += [row(what, p, "s", of[p], median["bf16"][p] if beside == "bf16" else of["step"], beside,
                     True) for p in PHASES]
        if "bf16" in rate:
            rows += [row(what, p, "tokens/s", rate[name][p], rate["bf16"][p], "bf16") for p in RATES]
        rows.append(row(what, "publish, of a step", "", of["publish"] / of["step"], 0.01, "a hundredth",
                        True))
        if beside == "bf16":
            worst = {n: max(s[MISMATCH] for s in found[n]["steps"][1:]) for n in (name, "bf16")}
            rows.append(row(what, MISMATCH, "", worst[name], worst["bf16"], "bf16", True))
        plan = sum(found[name]["plan"].values()) / 1e9
        peak = found[name]["steps"][-1]["memory/peak_gib"] * 2**30 / 1e9
        rows.append(row(what, "peak of the learner", "GB", peak, plan, "the plan", True))
        rows.append(row(what, "device, learner and engine", "GB", found[name]["device, GB"], plan,
                        "the learner's plan", True))
    return rows


if __name__ == "__main__":
    main()
