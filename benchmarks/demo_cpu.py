"""What `make demo` and `make demo-vllm` did on this machine, one beside the other.

    jaxfp8rl bench demo_cpu [RUN_OF_EMBEDDED RUN_OF_VLLM]

Reads the metrics.jsonl of both run directories (runs/make-demo and runs/make-demo-vllm unless named) and runs nothing.

Needs the runs of `make demo` and `make demo-vllm`.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, compare, curve, write
from jaxfp8rl.monitors.jsonl import read_metrics


def main() -> None:
    parser = arguments(__doc__, "demo_cpu")
    parser.add_argument("runs", nargs="*", default=["runs/make-demo", "runs/make-demo-vllm"])
    args = parser.parse_args()
    if missing := [run for run in args.runs if not Path(run, "metrics.jsonl").exists()]:
        sys.exit(f"no run in {', '.join(missing)}: `make demo` and `make demo-vllm` first")
    embedded, vllm = (read_metrics(Path(run, "metrics.jsonl")) for run in args.runs)
    engines = {run: tomllib.loads(Path(run, "config.toml").read_text())["rollout"] for run in args.runs}
    versions = [r["weights/version"] for r in vllm if r["step"] > 0]
    write(
        args.out, "demo_cpu", compare("demo", vllm, embedded, "the embedded engine"), args.plot, rollout=engines,
        every_version_sampled_once=versions == list(range(len(versions))),
        curves={"embedded": curve(embedded), "vllm": curve(vllm)},
    )  # fmt: skip


if __name__ == "__main__":
    main()
