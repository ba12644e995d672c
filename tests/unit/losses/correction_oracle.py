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

import numpy as np
from framework_oracles import (
    areal,
    areal_m2po,
    nemo,
    nemo_sequence_error,
    skyrl,
    slime_icepop,
    slime_mis,
    slime_tis,
    verl,
)
from oracle_parts import INF, Judge, Verdict, aggregate, clamp, like, log_ratios, scale_of, verdict

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
    """rho_seq * 1[rho_seq <= C], "When Speed Kills Stability": one-sided, with the raw weight."""
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
