"""The metrics of a step: those of its updates combined, as if the step had been one batch, and those of the
run's parts.

The updates may differ in their number of tokens, so means are weighted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxfp8rl.data.packing import Sample, placed, shared_fraction
from jaxfp8rl.memory.flops import mfu, update_flops
from jaxfp8rl.memory.peak import peak_memory_gib
from jaxfp8rl.publish.adapters import merge_error
from jaxfp8rl.training.context import RunContext
from jaxfp8rl.types import Params, TrainBatch

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
    """The numbers of tokens and sequences over which an update's metrics are means."""

    sampled: int  # response tokens
    kept: int  # response tokens that the correction did not reject
    in_loss: int  # response tokens in the loss's denominators
    sequences: int
    left: int  # sequences with at least one token that was not rejected
    positive: int  # response tokens with a positive advantage
    negative: int  # response tokens with a negative advantage


def counts_of(batch: TrainBatch, update: dict[str, float], drops_rejected: bool) -> Counts:
    """The counts of an update of `batch`, given its metrics.

    `drops_rejected`: whether rejected tokens are left out of the loss's denominators.
    """
    mask = np.asarray(batch.response_mask)
    mask = mask if batch.loss_weights is None else mask & (batch.loss_weights != 0)
    rows = np.arange(mask[..., 0].size).reshape(*mask.shape[:-1], 1) * (mask.shape[-1] + 1)
    sampled, sequences = int(mask.sum()), len(np.unique((rows + batch.segment_ids)[mask]))
    kept = round(sampled * (1 - update.get("correction/rejected_fraction", 0.0)))
    left = round(sequences * (1 - update.get("correction/lost_sequences", 0.0)))
    signs = (int((mask & side).sum()) for side in (batch.advantages > 0, batch.advantages < 0))
    return Counts(sampled, kept, kept if drops_rejected else sampled, sequences, left, *signs)


def of_step(rows: Sequence[dict[str, float]], counts: Sequence[Counts]) -> dict[str, float]:
    """The metrics of a step from those of its updates (`rows`) and their counts.

    The sets above name the metrics that are summed, taken at their extreme, taken from the last update, or
    averaged over updates. Any other metric is averaged over the tokens or sequences of all updates. Standard
    deviations are pooled around that mean, and Kish's effective sample size follows from both.
    prob_correlation and raw_ess cannot be combined exactly; the step has their means over tokens.
    """
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
    if not any(weights):  # no update counted a token: each has the neutral value
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
    """The field of Counts over which a metric is a mean."""
    if key.startswith("correction/sequence_weight_"):
        return "left"
    if key in OF_SEQUENCES or "_sequences" in key:
        return "sequences"
    if key.startswith("mismatch/skew_"):
        return key.removeprefix("mismatch/skew_")
    if key.startswith(("correction/weight_", "correction/ess")):
        return "kept"
    return "sampled" if key.startswith(("mismatch/", "correction/")) else "in_loss"


def of_parts(ctx: RunContext, policy: Params) -> dict[str, float]:
    """The metrics of the run's parts after a step: the engine, the scales and the replay, if there are any,
    and the memory."""
    found = {"engine/healthy": int(ctx.engine.health().ok), "memory/peak_gib": peak_memory_gib(),
             "engine/restarts": getattr(ctx.engine, "restarts", 0)}
    if ctx.precision.adapters and ctx.cfg.lora.publish == "merged":
        found["lora/merge_error"] = merge_error(policy, ctx.precision.adapters, ctx.runs,
                                                ctx.cfg.precision.weight_dtype)
    for part in (ctx.kv_scales, ctx.replay, ctx.engine, ctx.explorer):
        found |= getattr(part, "metrics", dict)()
    return found


def rates(ctx: RunContext, step: dict[str, float], samples: list[list[Sample]]) -> dict[str, float]:
    """Tokens a second and the share of the GPU's peak, given the metrics of a step and the samples of each of
    its updates."""
    t = ctx.cfg.train
    found = {"tokens/rollout_per_s": step["tokens/rollout"] / step["time/rollout_s"],
             "tokens/update_per_s": step["tokens/update"] / step["time/update_s"]}
    learned = [s for update in samples for s in placed(update, t.row_tokens, t.shared_prefix)]
    if t.shared_prefix:
        found["update/shared_fraction"] = shared_fraction(learned)
    if share := mfu(update_flops(ctx.model, learned), step["time/update_s"], t.devices):
        found["mfu/update"] = share
    return found
