"""Rotary position embeddings: the kinds that are known, read from config.json, and their frequencies.

Each kind is a frozen record with the names of config.json. Its `frequencies(powers, theta)` are radians a
position, [head_dim / 2], from powers = theta ** exponents, all float32.

Sources: RoPE (Su et al. 2021); linear scaling (Chen et al. 2023, arXiv 2306.15595); YaRN (Peng et al. 2023,
arXiv 2309.00071, sections 3.2 to 3.4); llama3 (Grattafiori et al. 2024, section 3.4.2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from jaxfp8rl.errors import ModelError, nearest

F32 = np.float32


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama 3.1: slow frequencies are divided by `factor`."""

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, powers: np.ndarray, theta: float) -> np.ndarray:
        length, frequencies = self.original_max_position_embeddings, 1 / powers
        # positions a turn, as torch divides a number by a tensor
        wave = 1 / frequencies * F32(2 * math.pi)
        smooth = (1 / wave * F32(length) - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor)
        between = (1 - smooth) * frequencies / self.factor + smooth * frequencies
        slower = np.where(wave > length / self.low_freq_factor, frequencies / self.factor, between)
        return np.where(wave < length / self.high_freq_factor, frequencies, slower)


@dataclasses.dataclass(frozen=True)
class LinearRope:
    """Positions are divided by `factor`."""

    rope_type: ClassVar[str] = "linear"
    factor: float

    def frequencies(self, powers: np.ndarray, theta: float) -> np.ndarray:
        return 1 / powers / F32(self.factor)


@dataclasses.dataclass(frozen=True)
class DynamicRope:
    """NTK-aware scaling beyond `max_position_embeddings`. Up to there, which is as far as a run goes, nothing
    is scaled."""

    rope_type: ClassVar[str] = "dynamic"
    factor: float

    def frequencies(self, powers: np.ndarray, theta: float) -> np.ndarray:
        return 1 / powers


@dataclasses.dataclass(frozen=True)
class YarnRope:
    """YaRN: slow frequencies are divided by `factor`, fast ones stay, and a ramp joins them. Cosines and
    sines are multiplied by `attention_scale`."""

    rope_type: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def attention_scale(self) -> float:
        """The factor of cosines and sines (section 3.4, equation 22)."""
        if self.attention_factor is not None:
            return self.attention_factor
        scale = lambda m=1.0: 1.0 if self.factor <= 1 else 0.1 * m * math.log(self.factor) + 1.0
        if self.mscale and self.mscale_all_dim:
            return scale(self.mscale) / scale(self.mscale_all_dim)
        return scale()

    def frequencies(self, powers: np.ndarray, theta: float) -> np.ndarray:
        dim, length = 2 * len(powers), self.original_max_position_embeddings
        pair_of = lambda turns: dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        high += 0.001 if low == high else 0
        ramp = np.clip((np.arange(dim // 2, dtype=F32) - F32(low)) / F32(high - low), 0, 1)
        unscaled = 1 - ramp
        return 1 / (F32(self.factor) * powers) * (1 - unscaled) + 1 / powers * unscaled


RopeScaling = Llama3Rope | LinearRope | DynamicRope | YarnRope
KINDS = {kind.rope_type: kind for kind in (Llama3Rope, LinearRope, DynamicRope, YarnRope)}


class Rope(NamedTuple):
    """The rotation of one kind of layers: its base, and the scaling of its frequencies, if any."""

    theta: float
    scaling: RopeScaling | None = None

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians a position for each rotated pair, [head_dim / 2] float32.

        Every step is rounded to float32, as in transformers and vLLM: positions multiply each difference."""
        exponents = np.arange(0, head_dim, 2, dtype=F32) / F32(head_dim)
        powers = (self.theta ** exponents.astype(np.float64)).astype(F32)
        return self.scaling.frequencies(powers, self.theta).astype(F32) if self.scaling else 1 / powers

    @property
    def amplitude(self) -> float:
        """The factor of cosines and sines."""
        return self.scaling.attention_scale if isinstance(self.scaling, YarnRope) else 1.0

    def to_hf(self) -> dict[str, Any]:
        """As in `rope_parameters` of transformers 5."""
        return {"rope_type": "default", **scaling_to_hf(self.scaling), "rope_theta": self.theta}


def scaling_to_hf(scaling: RopeScaling | None) -> dict[str, Any]:
    """As in `rope_scaling` of transformers 4, without the values that are its defaults; empty for none."""
    if scaling is None:
        return {}
    values = {f.name: value for f in dataclasses.fields(scaling)
              if (value := getattr(scaling, f.name)) != f.default}
    return {"rope_type": scaling.rope_type, **values}


def read_scaling(table: Mapping[str, Any], where: str, max_positions: int) -> RopeScaling | None:
    """From a `rope_parameters` or `rope_scaling` table; None for the default kind.

    Raises ModelError for an unknown kind, naming the nearest, and for a missing number."""
    name = table.get("rope_type", table.get("type", "default"))
    if table.get("partial_rotary_factor", 1) != 1:
        raise ModelError(
            f"{where}.partial_rotary_factor = {table['partial_rotary_factor']!r} is not "
            f"implemented, only 1 is", "use a model without it (docs/models.md)")
    if name == "default":
        return None
    if name not in KINDS:
        raise ModelError(f"{where}.rope_type = {name!r} is not implemented{nearest(str(name), KINDS)}",
                         f"use one of: default, {', '.join(KINDS)}")
    kind = KINDS[name]
    fields = {f.name: f for f in dataclasses.fields(kind)}
    values = {key: table[key] for key in fields if table.get(key) is not None}
    if kind is YarnRope:
        _complete_yarn(values, max_positions)
    missing = [key for key, field in fields.items()
               if field.default is dataclasses.MISSING and not _is_number(values.get(key))]
    if missing:
        raise ModelError(f"{where}: rope_type {name} needs numbers for {', '.join(missing)}",
                         "repair config.json, or download the model again")
    typed: Any = {key: float(value) if "float" in str(fields[key].type) else value
                  for key, value in values.items()}
    return kind(**typed)


def _complete_yarn(values: dict[str, Any], max_positions: int) -> None:
    """What transformers takes for keys that are absent or 0."""
    values.setdefault("original_max_position_embeddings", max_positions)
    if "factor" not in values and _is_number(values["original_max_position_embeddings"]):
        values["factor"] = max_positions / values["original_max_position_embeddings"]
    for key in ("beta_fast", "beta_slow"):
        if not values.get(key):
            values.pop(key, None)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
