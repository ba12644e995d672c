"""Long completions by vLLM, FP8 weights and cache beside BF16: Qwen3 shapes, random weights, CUDA graphs.

    jaxfp8rl bench rollout [--size 8b] [--prompts 64] [--new-tokens 8192] [--gpus 0 1]

Each engine is a process of its own and gets its weights by a publish. With --gpus both run at the same time, each on its own;
else one after the other. No completion ends early, so every step decodes a token of each: a step's floor is the time in which
the weights that it multiplies by, and the cache of the middle step, are read at RATE. Each prompt has a seed, as in a run.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import SHAPES, arguments, config, row, write

ENGINES = {"fp8": ("fp8_e4m3_128x128", "fp8_e4m3"), "bf16": ("bfloat16", "auto")}  # weights, cache
PROMPT = 128  # tokens
RATE = 4.1e12  # bytes a second: a copy's on an H200


def main() -> None:
    parser = arguments(__doc__, "rollout")
    parser.add_argument("--size", choices=SHAPES, default="8b")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=8192)
    parser.add_argument("--fp8-kernel", choices=["deep_gemm", "native"], default="deep_gemm", help="rollout.fp8_kernel")
    parser.add_argument("--gpus", nargs=2, help="of the two engines, as CUDA_VISIBLE_DEVICES has them")
    parser.add_argument("--child", nargs=2, metavar=("ENGINE", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        engine, out = args.child
        Path(out).write_text(json.dumps(measure(engine, args)))
        return
    if not shutil.which("nvidia-smi"):  # asking JAX would take the GPU's memory from the engines
        sys.exit("benchmarks/rollout.py needs an NVIDIA GPU")
    with tempfile.TemporaryDirectory() as folder:
        outs, children = {name: Path(folder, name) for name in ENGINES}, []
        for place, (name, out) in enumerate(outs.items()):
            children.append(start(name, out, args.gpus and args.gpus[place]))
            if not args.gpus:
                children[-1].wait()
        if any([child.wait() for child in children]):
            sys.exit("an engine failed: see above")
        found = {name: json.loads(out.read_text()) for name, out in outs.items()}
    case = f"Qwen3-{args.size.upper()}, {args.prompts} completions of {args.new_tokens} tokens"
    write(args.out, "rollout", rows_of(case, found), args.plot, each=found)


def start(name: str, out: Path, gpu: str | None) -> subprocess.Popen:
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
    return subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--child", name, str(out)], env=environment)


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    """Seconds of the engine's start and of the completions, ms of a step, and the bytes that bound it."""
    from bridges.rollout.vllm_engine import VllmEngine

    weights, cache = ENGINES[name]
    hf, length = config(args.size, args.layers), PROMPT + args.new_tokens
    per_token = 2 * hf["num_hidden_layers"] * hf["num_key_value_heads"] * hf["head_dim"] * (1 if name == "fp8" else 2)
    began = time.perf_counter()
    limits = dict(max_model_len=length, max_num_seqs=args.prompts, kv_cache_bytes=int(1.02 * per_token * length * args.prompts))
    kernel = args.fp8_kernel if name == "fp8" else "native"
    with contextlib.closing(VllmEngine(hf, weights=weights, kv_cache=cache, fp8_kernel=kernel, **limits)) as engine:
        weight_bytes = publish(engine, hf, fp8=name == "fp8")
        generate(engine, args.prompts, 8)  # the first compiles what is left to compile
        start = time.perf_counter() - began
        seconds = generate(engine, args.prompts, args.new_tokens)
    middle = args.prompts * (PROMPT + args.new_tokens / 2) * per_token
    print(f"{name}: there after {start:.1f} s, {args.new_tokens} tokens of each in {seconds:.1f} s", flush=True)
    return {
        "start, s": start, "rollout, s": seconds, "tokens/s": args.prompts * args.new_tokens / seconds,
        "step, ms": 1e3 * seconds / args.new_tokens, "weights, GB": weight_bytes / 1e9,
        "cache of the middle step, GB": middle / 1e9, "floor, ms": 1e3 * (weight_bytes + middle) / RATE,
    }  # fmt: skip


def publish(engine, hf: dict, fp8: bool) -> int:
    """Random weights -> bytes of what a step of decoding multiplies by. None is left with the learner."""
    from benchmarks.publish import in_codes, random_policy
    from bridges import manifest
    from bridges.weights.vllm_inplace import VllmInplace
    from jaxfp8rl.models.config import ModelConfig
    from jaxfp8rl.models.hf_names import linear_shapes
    from jaxfp8rl.precision.recipe import LayerRun, fp8_runs
    from jaxfp8rl.publish import LearnerWeights

    model = ModelConfig.from_hf(hf)
    layers = model.num_hidden_layers
    runs = fp8_runs(linear_shapes(model), layers) if fp8 else (LayerRun(0, layers, frozenset()),)
    policy, transport = random_policy(model), VllmInplace()
    source = LearnerWeights(model, in_codes(policy) if fp8 else policy, runs, "bfloat16")
    transport.open(engine)
    transport.publish(source, 0)
    read = manifest.nbytes([m for m in source.manifest() if model.tie_word_embeddings or "embed_tokens" not in m.name])
    del policy, source
    gc.collect()
    return read


def generate(engine, prompts: int, tokens: int) -> float:
    """Seconds for a completion of `tokens` of each prompt."""
    from bridges.api import GenRequest, SamplingParams

    prompt = lambda i: tuple(range(PROMPT * i, PROMPT * (i + 1)))
    requests = [GenRequest(str(i), prompt(i), SamplingParams(tokens), seed=i) for i in range(prompts)]
    began = time.perf_counter()
    groups = engine.generate(requests)
    seconds = time.perf_counter() - began
    if {len(c.token_ids) for group in groups for c in group} != {tokens}:
        sys.exit("a completion ended early")
    return seconds


def rows_of(case: str, found: dict[str, dict]) -> list[dict]:
    """FP8 beside BF16, and each engine's step beside its floor."""
    fp8, bf16 = found["fp8"], found["bf16"]
    rows = [row(case, "rollout", "tokens/s", fp8["tokens/s"], bf16["tokens/s"], "BF16 vLLM, same run")]
    return rows + [row(f"{case}, {name}", "decode step", "ms", f["step, ms"], f["floor, ms"], "bytes at 4.1 TB/s", True)
                   for name, f in found.items()]  # fmt: skip


if __name__ == "__main__":
    main()
