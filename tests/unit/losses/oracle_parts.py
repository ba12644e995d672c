"""The parts of the oracles in correction_oracle.py: decisions that remember how close they were, sums and
means over sequences, the metrics. float64 numpy, and nothing of jaxfp8rl."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

INF = math.inf
BOUND = 20.0  # verl, slime and SkyRL clamp log-ratios to this before they exponentiate
# 88.72: exp overflows in the frameworks' float32
FLOAT32_EXP_LIMIT = math.log(float(np.finfo(np.float32).max))

Ratios = list[np.ndarray]  # D of the live tokens, one 1-d array a sequence


class Verdict(NamedTuple):
    """weights [B, T]: 0 off the mask and at rejected tokens. counted [B, T] bool: the tokens in the loss's
    denominator.

    margin: the smallest distance between a compared statistic and its bound, relative to the magnitudes
    involved. A float32 implementation may decide differently if it is tiny.
    """

    weights: np.ndarray
    counted: np.ndarray
    margin: float


class Judge:
    """Closed-interval decisions that remember how close the closest one was."""

    def __init__(self) -> None:
        self.margin = INF

    def inside(self, x: np.ndarray | float, lower: float, upper: float,
               scale: np.ndarray | float = 1.0) -> np.ndarray:
        for bound in (lower, upper):
            if math.isfinite(bound) and np.size(x):
                self.margin = min(self.margin, float(np.min(np.abs(x - bound) / scale)))
        return (x >= lower) & (x <= upper)


def log_ratios(p: np.ndarray, g: np.ndarray, mask: np.ndarray) -> Ratios:
    """D of each sequence's live tokens; values under the mask are never read."""
    return [p_row[m].astype(np.float64) - g_row[m].astype(np.float64)
            for p_row, g_row, m in zip(p, g, mask, strict=True)]


def scatter(values: list[np.ndarray], mask: np.ndarray) -> np.ndarray:
    """The inverse of picking the live tokens: [B, T], 0 elsewhere."""
    out = np.zeros(mask.shape)
    for row, m, value in zip(out, mask, values, strict=True):
        row[m] = value
    return out


def clamp(x: np.ndarray | float) -> np.ndarray:
    return np.clip(x, -BOUND, BOUND)


def log(bound: float) -> float:
    return -INF if bound <= 0 else math.log(bound)


def scale_of(d: np.ndarray) -> float:
    """The magnitude of a float32 sum over d: its rounding error is a few 1e-7 of this."""
    return 1.0 + float(np.sum(np.abs(d)))


def aggregate(d: np.ndarray, how: str) -> float:
    """One number of a sequence; an empty sequence has 0 whatever the aggregation."""
    if d.size == 0:
        return 0.0
    return float({"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}[how](d))


def token_mean(values: list[np.ndarray]) -> float:
    flat = np.concatenate(values) if values else np.zeros(0)
    return float(np.mean(flat)) if flat.size else 0.0


def verdict(weights: list[np.ndarray], kept: list[np.ndarray], mask: np.ndarray, count_all: bool,
            judge: Judge) -> Verdict:
    kept_tokens = scatter(kept, mask) > 0
    return Verdict(np.where(kept_tokens, scatter(weights, mask), 0.0),
                   mask.copy() if count_all else kept_tokens, judge.margin)


def like(d: np.ndarray, value: float | bool) -> np.ndarray:
    """The sequence's one value at each of its tokens."""
    return np.full(d.shape, value)


def mismatch_metrics(p: np.ndarray, g: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """Off-policy diagnostics of a batch with at least one live token; means over tokens, or over non-empty
    sequences."""
    ratios = log_ratios(p, g, mask)
    d = np.concatenate(ratios)
    rows = [(p_row[m].astype(np.float64), g_row[m].astype(np.float64))
            for p_row, g_row, m in zip(p, g, mask, strict=True) if m.any()]
    log_ppl_diff = np.array([np.mean(gi) - np.mean(pi) for pi, gi in rows])
    flat_p, flat_g = np.concatenate([pi for pi, _ in rows]), np.concatenate([gi for _, gi in rows])
    middle = np.log((np.exp(flat_p) + np.exp(flat_g)) / 2)
    return {
        "kl": float(np.mean(-d)),
        "k3": float(np.mean(np.exp(d) - d - 1)),
        "policy_k3": float(np.mean(np.exp(-d) + d - 1)),
        "js": float(np.mean([np.exp(x - middle) - 1 - (x - middle) for x in (flat_p, flat_g)])),
        "abs": float(np.mean(np.abs(d))),
        "max_abs": float(np.max(np.abs(d))),
        "max_prob_diff": float(np.max(np.abs(np.exp(flat_p) - np.exp(flat_g)))),
        "mean_prob_diff": float(np.mean(np.abs(np.exp(flat_p) - np.exp(flat_g)))),
        "mult_prob_error": float(np.mean(np.exp(np.abs(d)))),
        "rho_mean": float(np.mean(np.exp(d))),
        "training_log_ppl": float(np.mean([-np.mean(pi) for pi, _ in rows])),
        "rollout_log_ppl": float(np.mean([-np.mean(gi) for _, gi in rows])),
        "training_ppl": float(np.mean([np.exp(-np.mean(pi)) for pi, _ in rows])),
        "rollout_ppl": float(np.mean([np.exp(-np.mean(gi)) for _, gi in rows])),
        "ppl_ratio": float(np.mean(np.exp(log_ppl_diff))),
        "log_ppl_diff": float(np.mean(log_ppl_diff)),
        "log_ppl_abs_diff": float(np.mean(np.abs(log_ppl_diff))),
        "log_ppl_diff_max": float(np.max(log_ppl_diff)),
        "log_ppl_diff_min": float(np.min(log_ppl_diff)),
        "chi2_token": float(np.mean(np.exp(2 * clamp(d)))) - 1,
        "chi2_sequence": float(np.mean([np.exp(2 * clamp(np.sum(x))) for x in ratios if x.size])) - 1,
    }


def weight_metrics(weights: np.ndarray, mask: np.ndarray) -> dict[str, float]:
    """Statistics of the weights [B, T] over the tokens of mask; the effective sample size is a fraction (Kish
    1965)."""
    w = weights[mask]
    mean, second = float(np.mean(w)), float(np.mean(w**2))
    return {
        "mean": mean, "std": float(np.std(w)), "max": float(np.max(w)), "min": float(np.min(w)),
        "ess": mean**2 / second if second > 0 else 0.0,
    }


def sequence_errors(p: np.ndarray, g: np.ndarray, mask: np.ndarray) -> list[float]:
    """NeMo's token_mult_prob_error of each sequence."""
    return [float(np.mean(np.exp(np.abs(d)))) if d.size else 0.0 for d in log_ratios(p, g, mask)]
