"""Whole runs on one GPU with vLLM in-process: the demo in FP8 beside BF16, and SmolLM2-135M in BF16 and FP8.

    python benchmarks/demo_h200.py [--smollm2 FOLDER [--kv8]] [--out benchmarks/results/demo_h200.json] [--keep DIR]

Each run is `jaxfp8rl train` in a process of its own; what is compared is read from its metrics.jsonl. The demo's FP8 run has
FP8 weights and FP8 KV; SmolLM2's has FP8 weights where its shapes allow, and with --kv8 one more run adds FP8 KV. CUDA graphs
are on. At these sizes FP8 is not expected to be faster: what is shown is that it learns the same.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import compare, curve, write
from jaxfp8rl.monitors.jsonl import read_metrics

DEMO = ["demo", "--rollout.engine", "vllm", "--precision.compute_dtype", "bfloat16"]
BF16 = ["--precision.recipe", "bf16", "--rollout.kv_cache", "auto"]
SMOL_FP8 = ["--precision.recipe", "fp8_unified", "--precision.exclude", "self_attn|gate_proj|up_proj"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", help="HF folder from `jaxfp8rl import-gguf`")
    parser.add_argument("--kv8", action="store_true", help="SmolLM2 with an FP8 cache as well")
    parser.add_argument("--out", default="benchmarks/results/demo_h200.json")
    parser.add_argument("--keep", default=tempfile.mkdtemp(), help="where the run directories go")
    args = parser.parse_args()
    if not shutil.which("nvidia-smi"):  # asking JAX would take the GPU's memory from the runs
        sys.exit("benchmarks/demo_h200.py needs an NVIDIA GPU")
    runs = {"demo/fp8": DEMO, "demo/bf16": [*DEMO, *BF16]}
    if args.smollm2:
        smol = ["smollm2-135m", "--model.path", args.smollm2]
        runs |= {"smollm2/bf16": smol, "smollm2/fp8": [*smol, *SMOL_FP8]}
        runs |= {"smollm2/fp8-kv8": [*smol, *SMOL_FP8, "--rollout.kv_cache", "fp8"]} if args.kv8 else {}
    records, problems = {}, {}
    for name, words in runs.items():
        folder = Path(args.keep, name.replace("/", "-"))
        done = subprocess.run([sys.executable, "-m", "jaxfp8rl.cli", "train", *words, "--run.dir", str(folder)])
        if done.returncode:
            problems[name] = f"left with exit code {done.returncode}"
        if (folder / "metrics.jsonl").exists():
            records[name] = read_metrics(folder / "metrics.jsonl")
    pairs = [(name, records.get(name), records.get(name.split("/")[0] + "/bf16")) for name in runs if "fp8" in name]
    rows = [r for pair in pairs for r in compare(*pair)]
    write(args.out, "demo_h200", rows, problems=problems, commands={k: shlex.join(v) for k, v in runs.items()},
          curves={k: curve(v) for k, v in records.items()})  # fmt: skip


if __name__ == "__main__":
    main()
