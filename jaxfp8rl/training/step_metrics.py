"""Metrics of a step from those of its updates, which need not have as many tokens as each other: as if it had
been one batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxfp8rl.types import TrainBatch

SUMS = {"tokens/update"}
LAST = {"update/loss_scale", "clip/bound_low", "clip/bound_high"}
OF_AN_UPDATE = {"loss", "grad_norm", "update/applied", "update/overflow", "correction/mix",
                "correction/batch_norm_factor"}
OF_SEQUENCES = {
    f"mismatch/{name}" for name in ("learner_ppl", "rollout_ppl", "ppl_ratio", "log_ppl_diff_mean",
                        "log_ppl_diff_abs_mean",
                        "log_ppl_diff_max", "log_ppl_diff_min", "chi2_seq",
                        "seq_mult_prob_error_max")
}
LARGEST = {"mismatch/max_logp_diff", "correction/sequence_weight_max_deviation"}  # and *_max


class Counts(NamedTuple):
    """What the metrics of an update are means over: response tokens as sampled, without the rejected, and as
    its loss counts them; sequences, and those that a token is left of; tokens with a positive and with a
    negative advantage."""

    sampled: int
    kept: int
    in_loss: int
    sequences: int
    left: int
    positive: int
    negative: int


def counts_of(batch: TrainBatch, update: dict[str, float], drops_rejected: bool) -> Counts:
    """`update`: its metrics; `drops_rejected`: whether what it rejects leaves the loss's denominators."""
    mask = np.asarray(batch.response_mask)
    mask = mask if batch.loss_weights is None else mask & (batch.loss_weights != 0)
    rows = np.arange(mask[..., 0].size).reshape(*mask.shape[:-1], 1) * (mask.shape[-1] + 1)
    sampled, sequences = int(mask.sum()), len(np.unique((rows + batch.segment_ids)[mask]))
    kept = round(sampled * (1 - update.get("correction/rejected_fraction", 0.0)))
    left = round(sequences * (1 - update.get("correction/lost_sequences", 0.0)))
    signs = (int((mask & side).sum()) for side in (batch.advantages > 0, batch.advantages < 0))
    return Counts(sampled, kept, kept if drops_rejected else sampled, sequences, left, *signs)


def of_step(rows: Sequence[dict[str, float]], counts: Sequence[Counts]) -> dict[str, float]:
    """Sums, extremes and last values as the names above say; of what is one number an update the mean over
    updates; of all else the mean over the tokens or sequences that it is a mean over, a standard deviation
    about it, and Kish's sample size of both. (prob_correlation and raw_ess do not follow from their parts:
    means over tokens.)"""
    found = {key: _joined(key, rows, counts) for key in rows[0]}
    if len(rows) > 1 and "correction/ess" in found:
        mean, std = found["correction/weight_mean"], found["correction/weight_std"]
        found["correction/ess"] = mean**2 / max(mean**2 + std**2, 1e-30)
    return found


def _joined(key: str, rows: Sequence[dict[str, float]], counts: Sequence[Counts]) -> float:
    if len(rows) == 1 or key in LAST:
        return rows[-1][key]
    values = [row[key] for row in rows]
    if key in SUMS | OF_AN_UPDATE:
        return float(np.sum(values) if key in SUMS else np.mean(values))
    if key == "update/bad_in_a_row":
        return max(values)
    weights = [getattr(count, _counted_by(key)) for count in counts]
    if not any(weights):  # of nothing: what is neutral
        return float(np.mean(values))
    held = [(row, weight) for row, weight in zip(rows, weights) if weight]
    if key in LARGEST or key.endswith(("_max", "_min")):
        return float((np.min if key.endswith("_min") else np.max)([row[key] for row, _ in held]))
    mean = lambda of: float(np.average([of(row) for row, _ in held], weights=[weight for _, weight in held]))
    if key.endswith("_std"):
        centre = key.removesuffix("_std") + "_mean"
        about = mean(lambda row: row[centre])
        return math.sqrt(mean(lambda row: row[key] ** 2 + (row[centre] - about) ** 2))
    return mean(lambda row: row[key])


def _counted_by(key: str) -> str:
    """The field of Counts that a metric is a mean over."""
    if key.startswith("correction/sequence_weight_"):
        return "left"
    if key in OF_SEQUENCES or "_sequences" in key:
        return "sequences"
    if key.startswith("mismatch/skew_"):
        return key.removeprefix("mismatch/skew_")
    if key.startswith(("correction/weight_", "correction/ess")):
        return "kept"
    return "sampled" if key.startswith(("mismatch/", "correction/")) else "in_loss"
