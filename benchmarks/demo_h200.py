"""Whole runs on one GPU with vLLM in-process: the demo in FP8 against BF16 over several seeds, and
SmolLM2-135M in BF16 and FP8.

    jaxfp8rl bench demo_h200 [--seeds 3] [--smollm2 FOLDER] [--keep DIR]

Each run is `jaxfp8rl train` in its own process; the comparison reads its metrics.jsonl. The demo's FP8 runs
have FP8 weights and an FP8 KV cache; SmolLM2's have FP8 weights where its shapes allow them, with and without
an FP8 KV cache. CUDA graphs are on. FP8 is not expected to be faster at these sizes; the benchmark shows that
it learns equally well. A finished run under DIR is reused, not repeated.

Needs a GPU and vLLM.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, compare, curve, require_gpu, write
from jaxfp8rl.monitors.jsonl import read_metrics

DEMO = ["demo", "--rollout.engine", "vllm", "--precision.compute_dtype", "bfloat16"]
BF16 = ["--precision.recipe", "bf16", "--rollout.kv_cache", "auto"]
SMOL_FP8 = ["--precision.recipe", "fp8_unified", "--precision.exclude", "self_attn|gate_proj|up_proj"]


def main() -> None:
    parser = arguments(__doc__, "demo_h200")
    parser.add_argument("--seeds", type=int, default=3, help="runs of the demo in each precision")
    parser.add_argument("--smollm2", help="HF folder from `jaxfp8rl import-gguf`")
    parser.add_argument("--keep", type=Path, default=tempfile.mkdtemp(), help="where the run directories go")
    args = parser.parse_args()
    require_gpu(__file__)
    runs = demo_runs(args.seeds) | (smollm2_runs(args.smollm2) if args.smollm2 else {})
    for name, words in runs.items():
        run(words, folder(args.keep, name))
    records = {n: read_metrics(path) for n in runs
               if (path := folder(args.keep, n) / "metrics.jsonl").exists()}
    problems = {n: f"ended at step {records[n][-1]['step'] if n in records else None}" for n in runs
                if not finished(folder(args.keep, n))}
    rows = []
    for name in runs:
        twin = name.replace("fp8-kv8", "bf16").replace("fp8", "bf16")
        if twin != name:
            rows += compare(name, records.get(name), records.get(twin))
    write(args.out, "demo_h200", rows, args.plot, problems=problems,
          commands={k: shlex.join(v) for k, v in runs.items()},
          curves={k: curve(v) for k, v in records.items()})


def demo_runs(seeds: int) -> dict[str, list[str]]:
    """The command line arguments of each run, by its name."""
    return {f"demo/{name}/seed{s}": [*DEMO, *words, "--run.seed", str(s)]
            for s in range(seeds) for name, words in {"fp8": [], "bf16": BF16}.items()}


def smollm2_runs(path: str) -> dict[str, list[str]]:
    words = ["smollm2-135m", "--model.path", path]
    return {"smollm2/bf16": words, "smollm2/fp8": [*words, *SMOL_FP8],
            "smollm2/fp8-kv8": [*words, *SMOL_FP8, "--rollout.kv_cache", "fp8"]}


def run(words: list[str], run_dir: Path) -> None:
    if not finished(run_dir):
        shutil.rmtree(run_dir, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "jaxfp8rl", "train", *words, "--run.dir", str(run_dir)])


def folder(keep: Path, name: str) -> Path:
    return Path(keep, name.replace("/", "-"))


def finished(run_dir: Path) -> bool:
    return (run_dir / "plot.png").exists()  # the last file that a run writes


if __name__ == "__main__":
    main()
