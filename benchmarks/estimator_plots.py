"""The plots of the estimator laboratory, from its result file.

    python benchmarks/estimator_plots.py [benchmarks/results/corrections.json [docs]]
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxfp8rl.monitors.end.plot import BLUE, GREEN, GREY, ORANGE, RED, STYLE, VIOLET, plt

SEQUENCES = 1024  # sequences of a batch, for the error of a batch
TEAL, PALE_BLUE = "#6cc5b0", "#9db2ee"
LINES = {  # preset: its label, colour, marker
    "none": ("no correction", GREY, "o"),
    "token_tis": ("token TIS", BLUE, "o"),
    "ais": ("AIS (our reading)", TEAL, "v"),
    "nemo/gspo": ("sequence IS, untruncated", RED, "s"),
    "sequence_tis": ("sequence TIS", ORANGE, "s"),
    "sequence_mis": ("sequence MIS", VIOLET, "s"),
    "geometric_mask": ("geometric mask [0.99, 1.01]", GREEN, "D"),
}
BARS = {
    "none": ("no correction", GREY),
    "nemo/is": ("token IS, untruncated", PALE_BLUE),
    "token_tis": ("token TIS", BLUE),
    "icepop": ("IcePop [0.5, 5]", TEAL),
    "sequence_tis": ("sequence TIS", ORANGE),
    "geometric_mask": ("geometric mask [0.99, 1.01]", GREEN),
}
MASKS = {
    "geometric_mask": ("geometric mean in [0.99, 1.01]", GREEN),
    "verl/decoupled_geo_rs": ("geometric mean in [0.999, 1.001]", BLUE),
    "vexact": ("mean K3 at most 0.001", VIOLET),
    "verl/decoupled_seq_is_rs": ("product in [0.5, 2]", RED),
}


def mean_squared_error(record: dict, sequences: float) -> float:
    """The squared error of the mean over this many sequences, relative to the squared norm of the true
    gradient."""
    return record["bias"] ** 2 + record["variance"] / sequences


def plot(results: str | Path, folder: str | Path) -> None:
    """Plot the records of `results` into folder/corrections-*.png."""
    found = json.loads(Path(results).read_text())["records"]
    pictures = {"length": (_bias, _angle, _variance, _share), "mismatch": (_error, _averaging, _kept, _noise)}
    with plt.rc_context(STYLE):
        for name, panels in pictures.items():
            figure, axes = plt.subplots(2, 2, figsize=(11, 8.4), layout="constrained")
            for draw, ax in zip(panels, axes.flat):
                draw(ax, found)
            figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
            figure.savefig(Path(folder) / f"corrections-{name}.png", dpi=130)
            plt.close(figure)


def _lines(ax, records: list[dict], x: str, y) -> None:
    for name, (label, color, marker) in LINES.items():
        points = [(r[x], y(r)) for r in records if r["preset"] == name]
        ax.plot(*zip(*points), color=color, marker=marker, ms=4, lw=1.8, label=label)
    ax.set(xscale="log", yscale="log")


def _values(records: list[dict], field: str) -> list:
    return sorted({r[field] for r in records})


def _lengths(ax, records: list[dict], title: str, ylabel: str) -> None:
    at = _values(records, "length")
    ax.set(title=title, ylabel=ylabel, xlabel="tokens a sequence", xscale="log", xticks=at, xticklabels=at)
    ax.minorticks_off()


def _known(field: str):
    """NaN if a simulation cannot distinguish the bias, or a quantity that depends on it, from 0."""
    return lambda r: r[field] if r["bias"] > max(1e-9, 2 * r["bias_error"]) else math.nan


def _bias(ax, found: dict) -> None:
    _lines(ax, found["length"], "length", _known("bias"))
    for name in ("none", "token_tis"):
        points = [(r["length"], r["bias"]) for r in found["length, fresh noise"] if r["preset"] == name]
        ax.plot(*zip(*points), color=LINES[name][1], ls=":", lw=1.8)
    _lengths(ax, found["length"], "Bias (dotted: every position its own noise)", "of the gradient's norm")


def _angle(ax, found: dict) -> None:
    _lines(ax, found["length"], "length", _known("angle_degrees"))
    _lengths(ax, found["length"], "What of it turns the gradient, not shortens it",
             "angle to the true gradient, degrees")
    ax.set_yticks([1, 3, 10, 30], [1, 3, 10, 30])


def _variance(ax, found: dict) -> None:
    _lines(ax, found["length"], "length", lambda r: r["variance"])
    _lengths(ax, found["length"], "Variance of one sequence", "of the gradient's squared norm")


def _share(ax, found: dict) -> None:
    _lines(ax, found["length"], "length", lambda r: r["effective_share"])
    _lengths(ax, found["length"], "Share of the tokens that counts", "effective sample size x share kept")
    ax.set_yticks([0.05, 0.1, 0.2, 0.5, 1], ["5%", "10%", "20%", "50%", "100%"])


def _error(ax, found: dict) -> None:
    records = found["mismatch"]
    _lines(ax, records, "mismatch", lambda r: mean_squared_error(r, SEQUENCES))
    ax.set(title=f"Squared error of {SEQUENCES:,} sequences of {records[0]['length']} tokens",
           ylabel="of the gradient's squared norm", xlabel="mismatch/token_mult_prob_error", xscale="linear",
           ylim=(5e-3, 10))


def _averaging(ax, found: dict) -> None:
    counts, size = np.logspace(2, 7, 60), _values(found["mismatch"], "size")[-2]
    chosen = [r for r in found["mismatch"] if r["size"] == size]
    for r in chosen:
        ax.plot(counts, [mean_squared_error(r, n) for n in counts], color=LINES[r["preset"]][1], lw=1.8)
    ax.set(title=f"By sequences averaged, at a mismatch of {chosen[0]['mismatch']:.2f}", xlabel="sequences",
           ylabel="of the gradient's squared norm", xscale="log", yscale="log", ylim=(5e-3, 10))


def _kept(ax, found: dict) -> None:
    for name, (label, color) in MASKS.items():
        for size, dashes in zip(_values(found["kept"], "size"), ":-"):
            points = [(r["length"], r["kept"]) for r in found["kept"]
                      if (r["preset"], r["size"]) == (name, size)]
            ax.plot(*zip(*points), color=color, ls=dashes, lw=1.8, label=label if dashes == "-" else None)
    _lengths(ax, found["kept"], "Tokens that rejections keep (dotted: half the mismatch)", "share")
    ax.set_ylim(0, 1.35)
    ax.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    ax.legend(loc="upper left", ncols=2, fontsize=8.5)


def _noise(ax, found: dict) -> None:
    known = _known("bias")
    kinds = list(dict.fromkeys(r["noise"] for r in found["noise"]))
    for i, (name, (label, color)) in enumerate(BARS.items()):
        values = [next(map(known, (r for r in found["noise"] if (r["preset"], r["noise"]) == (name, kind))))
                  for kind in kinds]
        ax.bar(np.arange(len(kinds)) + (i - 2.5) * 0.14, values, 0.13, color=color, label=label)
    length = found["noise"][0]["length"]
    ax.set(title=f"Bias by kind of noise, {length} tokens", xticks=range(len(kinds)),
           xticklabels=kinds, yscale="log", ylabel="of the gradient's norm", ylim=(1e-3, 20))
    ax.grid(axis="x", visible=False)
    ax.legend(loc="upper left", ncols=2, fontsize=8.5)


if __name__ == "__main__":
    plot(*(sys.argv[1:] + ["benchmarks/results/corrections.json", "docs"][len(sys.argv) - 1 :]))
