"""The results of `make demo` and `make demo-vllm` on this machine, side by side.

    jaxfp8rl bench demo_cpu [RUN_OF_EMBEDDED RUN_OF_VLLM]...

Reads the metrics.jsonl of pairs of run directories, one pair per seed (by default runs/make-demo and
runs/make-demo-vllm), and runs nothing.

Needs the runs of `make demo` and `make demo-vllm`.
"""

from __future__ import annotations

import itertools
import sys
import tomllib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.common import arguments, compare, curve, write
from jaxfp8rl.health.table import verdict
from jaxfp8rl.monitors.jsonl import read_metrics


def main() -> None:
    parser = arguments(__doc__, "demo_cpu")
    parser.add_argument("--note", default="",
                        help="a note stored with the rows, for example about other load on the machine")
    parser.add_argument("runs", nargs="*", default=["runs/make-demo", "runs/make-demo-vllm"])
    args = parser.parse_args()
    if len(args.runs) % 2:
        parser.error("give pairs of runs, one with the embedded engine and one with vLLM")
    if missing := [run for run in args.runs if not Path(run, "metrics.jsonl").exists()]:
        sys.exit(f"no run in {', '.join(missing)}: `make demo` and `make demo-vllm` first")
    configs = {run: tomllib.loads(Path(run, "config.toml").read_text()) for run in args.runs}
    records = {run: read_metrics(Path(run, "metrics.jsonl")) for run in args.runs}
    rows, curves = [], {}
    for embedded, vllm in itertools.batched(args.runs, 2):
        seed = configs[vllm]["run"]["seed"]
        rows += compare(f"demo/seed{seed}", records[vllm], records[embedded], "the embedded engine")
        curves[f"seed{seed}"] = {"embedded": curve(records[embedded]), "vllm": curve(records[vllm])}
    versions = [[r["weights/version"] for r in records[run] if r["step"] > 0] for run in args.runs[1::2]]
    write(
        args.out, "demo_cpu", rows, args.plot, note=args.note, curves=curves,
        rollout={run: config["rollout"] for run, config in configs.items()},
        verdicts={run: verdict(found).line for run, found in records.items()},
        every_version_sampled_once=all(v == list(range(len(v))) for v in versions),
    )


if __name__ == "__main__":
    main()
