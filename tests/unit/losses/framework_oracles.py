"""The rollout corrections of other frameworks, for correction_oracle.py: each function follows the arithmetic
of the one that it is named after (where it clamps, what it normalises over, in which order).
"""

from __future__ import annotations

import math

import numpy as np
from oracle_parts import (
    FLOAT32_EXP_LIMIT,
    INF,
    Judge,
    Verdict,
    aggregate,
    clamp,
    like,
    log,
    log_ratios,
    scale_of,
    token_mean,
    verdict,
)

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
