"""The results of the probes as a bounded number of metrics, as tables, and as a JSON file. It does not import
JAX."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Group
from rich.table import Table

Stats = dict[str, np.ndarray]

_WORST = {"error": np.max, "clipped": np.max, "zero": np.max, "underflow": np.max, "scale_min": np.min,
          "scale_max": np.max}
# gaps by group of layers, and whether their maximum or minimum is logged
_BY_SPAN = {"one_in": "max", "left_without": "min", "leave_one_out": "max"}


@dataclasses.dataclass(frozen=True)
class PrecisionReport:
    """The result of `probes.precision_report`, which defines the statistics.

    linears: their names. fp8: [L, linears] bool, whether a linear is FP8; the statistics of the others show
    what FP8 would do to them. weights, activations: statistic -> [L, linears]. kv: "key_error",
    "key_clipped", "key_amax", "value_..." -> [L], of keys and values divided by their scales. spans: the
    layers [start, stop) that were measured together. gaps: see `probes.mismatch_gaps`; empty without FP8.
    sharpness: in percent, see probes/sharpness.py. activations_fp8, kv_fp8: whether activations and cache are
    rounded at all.
    """

    linears: tuple[str, ...]
    fp8: np.ndarray
    weights: Stats
    activations: Stats
    kv: Stats
    spans: tuple[tuple[int, int], ...]
    gaps: Stats
    sharpness: float
    activations_fp8: bool
    kv_fp8: bool

    def metrics(self) -> dict[str, float]:
        """About 30 flat `precision/...` metrics, however deep the model. Layers and linears are given by
        index from 0, and a span of layers by its first layer. Only FP8 linears and caches count."""
        found = {"precision/sharpness": self.sharpness}
        if self.fp8.any():
            found |= self._extremes("weight", self.weights)
            if self.activations_fp8:
                found |= self._extremes("activation", self.activations)
        if self.kv_fp8:
            found |= {f"precision/{name}": float(values.max()) for name, values in self.kv.items()}
        if self.gaps:
            found |= {f"precision/gap_{name}": float(self.gaps[name]) for name in ("all", "weights", "kv")}
            for name, pick in _BY_SPAN.items():
                span = int(getattr(np, f"arg{pick}")(_comparable(self.gaps[name])))
                found[f"precision/{name}_{pick}"] = float(self.gaps[name][span])
                found[f"precision/{name}_layer"] = self.spans[span][0]
        return found

    def _extremes(self, kind: str, stats: Stats) -> dict[str, float]:
        """The mean error, the worst value of each statistic, and the positions of the worst error and
        underflow.

        A block with an outlier shows up in the underflow. Its error stays small, since the outlier dominates
        the norm.
        """
        found = {"error_mean": float(stats["error"][self.fp8].mean())}
        for name, pick in _WORST.items():
            key = name if name.startswith("scale") else f"{name}_worst"
            found[key] = float(pick(stats[name][self.fp8]))
        for name in ("error", "underflow"):
            values = np.where(self.fp8, _comparable(stats[name]), -1.0)
            layer, linear = np.unravel_index(values.argmax(), values.shape)
            found |= {f"{name}_layer": int(layer), f"{name}_linear": int(linear)}
        return {f"precision/{kind}_{name}": value for name, value in found.items()}

    def tables(self) -> Group:
        """All tables, for `rich.print`."""
        parts = [self._linear_table("Weights, 128x128 blocks", self.weights)]
        parts.append(self._linear_table("Input activations, 1x128 blocks", self.activations))
        parts.append(self._kv_table())
        if self.gaps:
            parts.append(self._gap_table())
        return Group(*parts, f"logit sharpness {self.sharpness:.3g} %")

    def _linear_table(self, title: str, stats: Stats) -> Table:
        table = _table(title, "layer", "linear", *(name.replace("_", " ") for name in _WORST))
        for layer in range(len(self.fp8)):
            for i, name in enumerate(self.linears):
                cells = [f"{stats[k][layer, i]:.2g}" for k in _WORST]
                table.add_row(str(layer), name, *cells, style="" if self.fp8[layer, i] else "dim")
        table.caption = None if self.fp8.all() else "dim: stays in high precision; shows the effect of FP8"
        return table

    def _kv_table(self) -> Table:
        table = _table("Keys and values over their scales, E4M3", "layer",
                       *(k.replace("_", " ") for k in self.kv))
        for layer in range(len(self.fp8)):
            table.add_row(str(layer), *(f"{v[layer]:.2g}" for v in self.kv.values()),
                          style="" if self.kv_fp8 else "dim")
        table.caption = None if self.kv_fp8 else "dim: cache in high precision; shows the effect of FP8"
        return table

    def _gap_table(self) -> Table:
        whole = ", ".join(f"{name} {float(self.gaps[name]):.4g}" for name in ("all", "weights", "kv"))
        table = _table(f"Mean |d logp| of FP8, nats: {whole}", "layers",
                       *(name.replace("_", " ") for name in _BY_SPAN))
        for i, (start, stop) in enumerate(self.spans):
            cells = [f"{self.gaps[name][i]:.4g}" for name in _BY_SPAN]
            table.add_row(str(start) if stop == start + 1 else f"{start}-{stop - 1}", *cells)
        return table

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, with NaN and infinity as Python's json writes them."""
        plain = dataclasses.asdict(self)
        Path(path).write_text(json.dumps(plain, default=lambda x: x.tolist()) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> PrecisionReport:
        """Read a report that `save` wrote."""
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
        arrays = {k: {n: np.asarray(v, np.float32) for n, v in raw[k].items()}
                  for k in ("weights", "activations", "kv", "gaps")}
        spans = tuple(map(tuple, raw["spans"]))
        return cls(**{**raw, **arrays, "linears": tuple(raw["linears"]), "fp8": np.asarray(raw["fp8"], bool),
                      "spans": spans})


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, no_wrap=True, justify="left" if name in ("layer", "layers", "linear")
                         else "right")
    return table


def _comparable(x: np.ndarray) -> np.ndarray:
    """The array with infinity in place of NaN, which so counts as the worst value."""
    return np.where(np.isnan(x), np.inf, x)
