"""The rollout corrections of the other frameworks, written a second time for reading: float64 numpy, loops
over sequences.

An oracle for `jaxfp8rl.losses.correction`, independent of it: nothing here imports jaxfp8rl, and each
function follows the arithmetic of the framework it is named after (where it clamps, what it normalises over,
in which order), not our algebra.

p [B, T] is the learner's log-probability (old_logp), g [B, T] the engine's (rollout_logp), mask [B, T] the
live tokens; a row is one sequence. D = p - g at the live tokens, rho = exp(D).
"""

from __future__ import annotations

import math
from collections.abc import Callable
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

    margin: the smallest distance between a statistic that was compared and the bound it was compared with,
    relative to the magnitudes that went into it. A float32 implementation may decide otherwise where it is
    tiny.
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


# --- building blocks
# ------------------------------------------------------------------------------------------------


def log_ratios(p: np.ndarray, g: np.ndarray, mask: np.ndarray) -> Ratios:
    """D of each sequence's live tokens; what stands under the mask is never looked at."""
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
    """What a float32 sum over d carries as magnitude: its rounding error is a few 1e-7 of this."""
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


# --- verl: verl/trainer/ppo/rollout_corr_helper.py
# ------------------------------------------------------------------


def verl(
    p: np.ndarray, g: np.ndarray, mask: np.ndarray, *,
    weight: str | None = None, upper: float = 2.0, lower: float | None = None, normalize: bool = False,
    rejections: tuple[tuple[str, str, float, float], ...] = (), bypass: bool = False,
) -> Verdict:
    """rejections: (level_aggregation, statistic, lower, upper) as in "seq_sum", "k1"; k1 bounds are ratios,
    k2 and k3 nats.

    Weights: token exp(clip(D)), sequence exp(clip(sum D)): the clamp comes after the sum. A lone upper bound
    truncates, two are IcePop. They are normalised to mean 1 over all live tokens (sequences), those that get
    rejected included. Rejection: each token is clamped before it is aggregated; k1 is -D, so its bounds are
    on 1/rho. Every option judges the original mask. The decoupled mode divides by the survivors, the bypass
    mode by the count before the rejection.
    """
    judge, ratios = Judge(), log_ratios(p, g, mask)
    weights = [_verl_weights(d, weight, lower, upper, judge) for d in ratios]
    if normalize and weight == "token":
        weights = _divide(weights, token_mean(weights))
    if normalize and weight == "sequence":
        weights = _divide(weights, float(np.mean([w[0] for w in weights if w.size] or [1.0])))
    kept = [like(d, True) for d in ratios]
    for option, statistic, low, high in rejections:
        kept = [k & _verl_keeps(d, option, statistic, low, high, judge)
                for k, d in zip(kept, ratios, strict=True)]
    return verdict(weights, kept, mask, bypass, judge)


def _verl_weights(d: np.ndarray, weight: str | None, lower: float | None, upper: float,
                  judge: Judge) -> np.ndarray:
    if weight is None:
        return like(d, 1.0)
    log_w = clamp(d) if weight == "token" else like(d, clamp(aggregate(d, "sum")))
    if lower is None:
        return np.minimum(np.exp(log_w), upper)
    scale = 1.0 + np.abs(d) if weight == "token" else scale_of(d)
    return np.where(judge.inside(log_w, log(lower), log(upper), scale), np.exp(log_w), 0.0)


def _verl_keeps(d: np.ndarray, option: str, statistic: str, low: float, high: float,
                judge: Judge) -> np.ndarray:
    c = clamp(d)
    values = {"k1": -c, "k2": c**2 / 2, "k3": np.exp(c) - 1 - c}[statistic]
    if statistic == "k1":
        low, high = math.log(low), math.log(high)
    if option == "token":
        return judge.inside(values, low, high, 1.0 + np.abs(values))
    how = option.removeprefix("seq_")
    size = float(np.sum(np.abs(values))) / (max(d.size, 1) if how == "mean" else 1)
    return like(d, bool(judge.inside(aggregate(values, how), low, high, 1.0 + size)) or d.size == 0)


def _divide(weights: list[np.ndarray], mean: float) -> list[np.ndarray]:
    return [w / mean for w in weights] if mean > 1e-8 else weights


# --- NeMo RL: nemo_rl/algorithms/loss/loss_functions.py
# -------------------------------------------------------------


def nemo(p: np.ndarray, g: np.ndarray, mask: np.ndarray, *, kind: str | None = None, lower: float = 0.0,
         upper: float = INF, level: str = "token") -> Verdict:
    """kind: None (no truncation), "tis", "icepop" or "seq-mask-tis"; level "sequence" is the product, for
    GSPO.

    exp is not clamped: where float32 overflows the weight is 0, before the truncation. seq-mask-tis keeps a
    sequence by its geometric-mean ratio and leaves its token weights raw. The denominators never change.
    """
    judge, weights, kept = Judge(), [], []
    for d in log_ratios(p, g, mask):
        log_w = d if level == "token" else like(d, aggregate(d, "sum"))
        scale = 1.0 + np.abs(d) if level == "token" else scale_of(d)
        judge.inside(log_w, -INF, FLOAT32_EXP_LIMIT, scale)
        w = np.where(log_w > FLOAT32_EXP_LIMIT, 0.0, np.exp(np.minimum(log_w, FLOAT32_EXP_LIMIT)))
        keep = like(d, True)
        if kind == "tis":
            w = np.clip(w, lower, upper)
        elif kind == "icepop":
            w = np.where(judge.inside(log_w, log(lower), log(upper), scale), w, 0.0)
        elif kind == "seq-mask-tis":
            inside = judge.inside(aggregate(d, "mean"), log(lower), log(upper), scale_of(d) / max(d.size, 1))
            keep = like(d, bool(inside) or d.size == 0)
        weights.append(w)
        kept.append(keep)
    return verdict(weights, kept, mask, True, judge)


def nemo_sequence_error(p: np.ndarray, g: np.ndarray, mask: np.ndarray, *, upper: float = 2.0) -> Verdict:
    """seq_logprob_error_threshold (nemo_rl/algorithms/grpo.py): keep a sequence iff mean(e^|D|) <= upper.

    The sample mask is edited before the global counts are taken: dropped sequences leave the denominator. Raw
    token weights.
    """
    judge, weights, kept = Judge(), [], []
    for d in log_ratios(p, g, mask):
        error = float(np.mean(np.exp(np.abs(d)))) if d.size else 0.0
        kept.append(like(d, bool(judge.inside(error, -INF, upper))))
        weights.append(np.where(d > FLOAT32_EXP_LIMIT, 0.0, np.exp(np.minimum(d, FLOAT32_EXP_LIMIT))))
    return verdict(weights, kept, mask, False, judge)


# --- slime: slime/backends/megatron_utils/loss.py, examples/train_infer_mismatch_helper/mis.py
# ----------------------


def slime_tis(p: np.ndarray, g: np.ndarray, mask: np.ndarray, *, lower: float = 0.0,
              upper: float = 2.0) -> Verdict:
    """The built-in --use-tis: the unclamped ratio clamped to [tis_clip_low, tis_clip]; infinity becomes the
    upper bound."""
    ratios = log_ratios(p, g, mask)
    weights = [np.clip(np.exp(np.minimum(d, 700.0)), lower, upper) for d in ratios]
    return verdict(weights, [like(d, True) for d in ratios], mask, True, Judge())


def slime_icepop(p: np.ndarray, g: np.ndarray, mask: np.ndarray, *, lower: float, upper: float) -> Verdict:
    judge, ratios = Judge(), log_ratios(p, g, mask)
    weights = [
        np.where(judge.inside(d, log(lower), log(upper), 1.0 + np.abs(d)), np.exp(np.minimum(d, 700.0)), 0.0)
        for d in ratios
    ]
    return verdict(weights, [like(d, True) for d in ratios], mask, True, judge)


def slime_mis(
    p: np.ndarray, g: np.ndarray, mask: np.ndarray, *,
    level: str = "token", mode: str = "truncate", lower: float = 0.5, upper: float = 2.0,
    rs_level: str | None = None, rs_lower: float | None = None, rs_upper: float | None = None,
    veto: float | None = None, normalize: bool = False,
) -> Verdict:
    """mis.py. Log-ratios are aggregated raw and clamped afterwards, for weights and for rejection alike.

    mode "mask" edits the mask and leaves the weights raw. The rejection bounds default to those of the
    weights. A veto rejects a sequence for one token with D < log(veto). Normalisation comes last and over the
    original masks, with the weights of rejected tokens in the mean. The denominators stay those of the
    original masks, in spite of the README.
    """
    judge, weights, kept = Judge(), [], []
    ratios = log_ratios(p, g, mask)
    for d in ratios:
        log_w = _slime_log_ratio(d, level)
        w, keep = np.exp(log_w), like(d, True)
        if mode == "truncate":
            w = np.clip(w, 0.0, upper)
        elif mode == "clip":
            w = np.clip(w, lower, upper)
        else:
            keep = _slime_inside(d, level, lower, upper, judge)
        if rs_level is not None:
            low, high = lower if rs_lower is None else rs_lower, upper if rs_upper is None else rs_upper
            keep = keep & _slime_inside(d, rs_level, low, high, judge)
        if veto is not None:
            keep = keep & bool(np.all(judge.inside(d, log(veto), INF, 1.0 + np.abs(d))))
        weights.append(w)
        kept.append(keep)
    if normalize and level == "token":
        weights = _divide(weights, token_mean(weights))
    elif normalize:  # a sequence without live tokens would count with 0 in slime; there, it never occurs
        weights = _divide(weights, float(np.mean([w[0] for w in weights if w.size] or [1.0])))
    return verdict(weights, kept, mask, True, judge)


def _slime_log_ratio(d: np.ndarray, level: str) -> np.ndarray:
    return clamp(d if level == "token"
                 else like(d, aggregate(d, {"sequence": "sum", "geometric": "mean"}[level])))


def _slime_inside(d: np.ndarray, level: str, lower: float, upper: float, judge: Judge) -> np.ndarray:
    scale = {"token": 1.0 + np.abs(d), "sequence": scale_of(d),
             "geometric": scale_of(d) / max(d.size, 1)}[level]
    return judge.inside(_slime_log_ratio(d, level), log(lower), log(upper), scale)


# --- AReaL: areal/utils/functional/functional.py, areal/trainer/ppo/actor.py
# ----------------------------------------


def areal(
    p: np.ndarray, g: np.ndarray, mask: np.ndarray, *, level: str = "token", action: str = "mask",
    metric: str = "ratio",
    agg: str = "mean", lower: float | None = None, upper: float = 5.0,
) -> Verdict:
    """RejectionSamplingConfig. Nothing is clamped. The sequence weight of metric "ratio" is the geometric
    mean, whatever agg is; the KL metrics weigh each token by its raw ratio. k1 = D, k3 = e^-D - 1 + D.
    Rejected tokens stay in the denominator.
    """
    judge, weights, kept = Judge(), [], []
    for d in log_ratios(p, g, mask):
        w = np.exp(np.minimum(d, 700.0))
        if level == "sequence" and metric == "ratio":
            w = like(d, math.exp(min(aggregate(d, "mean"), 700.0)))
        inside = _areal_inside(d, level, metric, agg, -INF if lower is None else lower, upper, judge)
        if action == "clamp":
            w = np.where(inside, w, np.clip(w, lower or 0.0, upper))
        weights.append(w)
        kept.append(inside if action == "mask" else like(d, True))
    return verdict(weights, kept, mask, True, judge)


def _areal_inside(d: np.ndarray, level: str, metric: str, agg: str, low: float, high: float,
                  judge: Judge) -> np.ndarray:
    values = {"ratio": d, "k1": d, "k2": d**2 / 2, "k3": np.exp(np.minimum(-d, 700.0)) - 1 + d}[metric]
    if metric == "ratio":  # aggregated in log space, compared after exp
        low, high = log(low), log(high)
    if level == "token":
        return judge.inside(values, low, high, 1.0 + np.abs(values))
    size = float(np.sum(np.abs(values))) / (max(d.size, 1) if agg == "mean" else 1)
    return like(d, bool(judge.inside(aggregate(values, agg), low, high, 1.0 + size)) or d.size == 0)


def areal_m2po(
    p: np.ndarray, g: np.ndarray, mask: np.ndarray, *, limit: float = 0.04, ratio_upper: float | None = None
) -> Verdict:
    """M2PO as AReaL has it: drop the fewest tokens of largest D^2 such that the mean of D^2 of the rest is
    below the limit.

    Over all live tokens of the batch, unclamped; strict; at least one token stays. Advantages play no part.
    With ratio_upper the token-ratio mask of AReaL's recipe follows, whose raw weights are the importance
    weights.
    """
    judge, ratios = Judge(), log_ratios(p, g, mask)
    m2 = np.sort(np.concatenate([d**2 for d in ratios]))[::-1]
    dropped = 0
    while dropped < m2.size - 1 and not np.mean(m2[dropped:]) < limit:
        dropped += 1
    for k in range(max(dropped - 1, 0), min(dropped + 1, m2.size)):  # the two suffixes the decision hangs on
        judge.inside(float(np.mean(m2[k:])), -INF, limit, 1.0 + float(np.mean(m2[k:])))
    if dropped:
        # a tie is anybody's
        judge.margin = min(judge.margin, float((m2[dropped - 1] - m2[dropped]) / m2[dropped - 1]))
    cut = m2[dropped] if m2.size else 0.0
    kept = [d**2 <= cut for d in ratios]
    if ratio_upper is None:
        return verdict([like(d, 1.0) for d in ratios], kept, mask, False, judge)
    inside = [judge.inside(d, -INF, math.log(ratio_upper), 1.0 + np.abs(d)) for d in ratios]
    weights = [np.where(i, np.exp(np.minimum(d, 700.0)), 0.0) for d, i in zip(ratios, inside, strict=True)]
    # the M2 rejects leave the count, the ratio rejects stay in it
    return verdict(weights, kept, mask, False, judge)


# --- SkyRL: skyrl/backends/skyrl_train/utils/off_policy_correction_utils.py
# -----------------------------------------


def skyrl(p: np.ndarray, g: np.ndarray, mask: np.ndarray, *, tis: str | None = None, tis_high: float = 2.0,
          sequence_mask: str | None = None, low: float = 0.99, high: float = 1.01,
          outliers: tuple[float, float] | None = None, tokens: tuple[float, float] | None = None,
          count_all: bool = True) -> Verdict:
    """Outlier mask, token mask, weights, sequence mask: each over the tokens that those before it left.

    Aggregated raw, clamped afterwards. Advantages were divided by the original counts before: rejected tokens
    stay counted.
    """
    judge, weights, kept = Judge(), [], []
    for d in log_ratios(p, g, mask):
        keep = like(d, True)
        if outliers is not None:
            keep &= bool(np.all(judge.inside(clamp(d), *map(log, outliers), 1.0 + np.abs(d))))
        if tokens is not None:
            keep &= judge.inside(clamp(d), *map(log, tokens), 1.0 + np.abs(d))
        left = d[keep]
        w = {None: like(d, 1.0), "token": np.exp(clamp(d)),
             "sequence": like(d, math.exp(clamp(aggregate(left, "sum"))))}[tis]
        if sequence_mask is not None:
            how, count = ("mean", max(left.size, 1)) if sequence_mask == "geometric" else ("sum", 1)
            inside = judge.inside(clamp(aggregate(left, how)), log(low), log(high), scale_of(left) / count)
            keep &= bool(inside) or left.size == 0
        weights.append(np.minimum(w, tis_high) if tis else w)
        kept.append(keep)
    return verdict(weights, kept, mask, count_all, judge)


# --- ours
# -----------------------------------------------------------------------------------------------------------


def none(p: np.ndarray, g: np.ndarray, mask: np.ndarray) -> Verdict:
    return Verdict(mask.astype(np.float64), mask.copy(), INF)


def token_tis(p: np.ndarray, g: np.ndarray, mask: np.ndarray, *, upper: float = 2.0) -> Verdict:
    """min(exp(D), C): Yao et al. 2025, as FlashRL uses it."""
    ratios = log_ratios(p, g, mask)
    weights = [np.minimum(np.exp(clamp(d)), upper) for d in ratios]
    return verdict(weights, [like(d, True) for d in ratios], mask, True, Judge())


def sequence_mis(p: np.ndarray, g: np.ndarray, mask: np.ndarray, *, upper: float = 2.0) -> Verdict:
    """rho_seq * 1[rho_seq <= C], "When Speed Kills Stability": one-sided, the weight raw."""
    judge, weights = Judge(), []
    for d in log_ratios(p, g, mask):
        total = aggregate(d, "sum")
        inside = bool(judge.inside(clamp(total), -INF, math.log(upper), scale_of(d)))
        weights.append(like(d, math.exp(clamp(total)) if inside else 0.0))
    return verdict(weights, [like(w, True) for w in weights], mask, True, judge)


def adaptive(p: np.ndarray, g: np.ndarray, mask: np.ndarray, *, upper: float = 2.0, power: float = 1.0,
             onset: float = 0.02, slope: float = 0.01, cv_scale: float = 1.0) -> Verdict:
    """Adaptive importance sampling in the project's reconstruction: (1 - a) + a w, a from ESS, mean |D| and
    CV of w."""
    ratios = log_ratios(p, g, mask)
    weights = [np.minimum(np.exp(clamp(d)), upper) for d in ratios]
    w, d = np.concatenate(weights), np.concatenate(ratios)
    a = 0.0
    if w.size:
        ess = np.sum(w) ** 2 / (w.size * np.sum(w**2))
        wanted = 1.0 / (1.0 + math.exp(-min(max((float(np.mean(np.abs(d))) - onset) / slope, -500.0), 500.0)))
        a = float(ess**power * wanted / (1.0 + np.std(w) / np.mean(w) / cv_scale))
    mixed = [(1.0 - a) + a * x for x in weights]
    return verdict(mixed, [like(x, True) for x in weights], mask, True, Judge())


# --- metrics
# --------------------------------------------------------------------------------------------------------


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


# --- the presets
# ----------------------------------------------------------------------------------------------------

Oracle = Callable[[np.ndarray, np.ndarray, np.ndarray], Verdict]

GEO = (("seq_mean", "k1", 0.999, 1.001),)
K3 = (("seq_mean", "k3", -INF, 0.01),)
SEQ = (("seq_sum", "k1", 0.5, 2.0),)


def preset(function: Callable[..., Verdict], **arguments: object) -> Oracle:
    return lambda p, g, mask: function(p, g, mask, **arguments)


ORACLES: dict[str, Oracle] = {
    "none": preset(none),
    "token_tis": preset(token_tis),
    "sequence_tis": preset(verl, weight="sequence"),
    "icepop": preset(verl, weight="token", lower=0.5, upper=5.0),
    "sequence_mis": preset(sequence_mis),
    "geometric_mask": preset(skyrl, sequence_mask="geometric", count_all=False),
    "vexact": preset(verl, weight="token", rejections=(("seq_mean", "k3", -INF, 0.001),)),
    "ais": preset(adaptive),
    "flashrl/tis_2": preset(token_tis, upper=2.0),
    "flashrl/tis_8": preset(token_tis, upper=8.0),
    "verl/disabled": preset(verl),
    "verl/decoupled_token_is": preset(verl, weight="token"),
    "verl/decoupled_seq_is": preset(verl, weight="sequence"),
    "verl/decoupled_token_icepop": preset(verl, weight="token", lower=0.5, upper=5.0),
    "verl/decoupled_seq_is_rs": preset(verl, weight="sequence", rejections=SEQ),
    "verl/decoupled_geo_rs": preset(verl, rejections=GEO),
    "verl/decoupled_geo_rs_seq_tis": preset(verl, weight="sequence", rejections=GEO),
    "verl/decoupled_geo_rs_token_tis": preset(verl, weight="token", rejections=GEO),
    "verl/decoupled_k3_rs": preset(verl, rejections=K3),
    "verl/decoupled_k3_rs_seq_tis": preset(verl, weight="sequence", rejections=K3),
    "verl/decoupled_k3_rs_token_tis": preset(verl, weight="token", rejections=K3),
    "verl/bypass_ppo_clip": preset(verl, bypass=True),
    "verl/bypass_ppo_clip_geo_rs": preset(verl, rejections=GEO, bypass=True),
    "verl/bypass_ppo_clip_k3_rs": preset(verl, rejections=K3, bypass=True),
    "verl/bypass_pg_is": preset(verl, weight="sequence", bypass=True),
    "verl/bypass_pg_token_icepop": preset(verl, weight="token", lower=0.5, upper=5.0, bypass=True),
    "verl/bypass_pg_geo_rs": preset(verl, rejections=GEO, bypass=True),
    "verl/bypass_pg_geo_rs_seq_tis": preset(verl, weight="sequence", rejections=GEO, bypass=True),
    "verl/bypass_pg_geo_rs_token_tis": preset(verl, weight="token", rejections=GEO, bypass=True),
    "nemo/is": preset(nemo),
    "nemo/tis": preset(nemo, kind="tis", upper=2.0),
    "nemo/icepop": preset(nemo, kind="icepop", lower=0.5, upper=5.0),
    "nemo/seq_mask_tis": preset(nemo, kind="seq-mask-tis", lower=0.999, upper=1.002),
    "nemo/gspo": preset(nemo, level="sequence"),
    "nemo/seq_logprob_error": preset(nemo_sequence_error),
    "slime/tis": preset(slime_tis),
    "slime/icepop": preset(slime_icepop, lower=0.0, upper=2.0),
    "slime/mis": preset(slime_mis, rs_level="token", veto=1e-4, normalize=True),
    "slime/mis_sequence": preset(slime_mis, level="sequence", rs_level="sequence", veto=1e-4, normalize=True),
    "slime/mis_geometric": preset(slime_mis, level="geometric", rs_level="geometric", veto=1e-4),
    "slime/mis_clip": preset(slime_mis, mode="clip", rs_level="token", veto=1e-4, normalize=True),
    "slime/mis_mask": preset(slime_mis, mode="mask", rs_level="token", veto=1e-4, normalize=True),
    "areal/token_mask": preset(areal),
    "areal/token_clamp": preset(areal, action="clamp"),
    "areal/sequence_mask": preset(areal, level="sequence"),
    "areal/sequence_clamp": preset(areal, level="sequence", action="clamp"),
    "areal/token_k1": preset(areal, metric="k1"),
    "areal/token_k2": preset(areal, metric="k2"),
    "areal/token_k3": preset(areal, metric="k3"),
    "areal/sequence_k1": preset(areal, level="sequence", metric="k1"),
    "areal/sequence_k2": preset(areal, level="sequence", metric="k2"),
    "areal/sequence_k3": preset(areal, level="sequence", metric="k3"),
    # its shipped recipe: the M2 mask, then the default ratio mask
    "areal/m2po": preset(areal_m2po, ratio_upper=5.0),
    "prime_rl/default": preset(none),
    "skyrl/token_tis": preset(skyrl, tis="token"),
    "skyrl/seq_tis": preset(skyrl, tis="sequence", tis_high=5.0),
    "skyrl/geo_mask": preset(skyrl, sequence_mask="geometric"),
    "skyrl/recommended": preset(skyrl, sequence_mask="geometric", tis="token"),
    "skyrl/guide": preset(skyrl, sequence_mask="geometric", tis="token", outliers=(1e-4, 100.0),
                          tokens=(0.5, 2.0)),
}
