"""Corrections under the names that other frameworks and papers use, with their arithmetic, quirks included.

They follow the sources of verl (1dda039b), NeMo RL (7ea279ab), slime (624b824a), AReaL (4aef98d8), SkyRL
(a9564572) and prime-rl (559b4477). The same word means different things: "TIS" is capped by verl and zeroed
on overflow by NeMo RL; a "sequence" weight is a product for verl and a geometric mean for AReaL; four
different methods are called "MIS". docs/correction_presets.md has the table. Comments below name the parts
that could not be expressed.

Quirks kept:
- verl compares k1 = -D with the logarithms of its bounds, so they bound mu/pi_old: `inverse=True`. Its own
  presets are nearly symmetric, which hides it.
- All presets but those of verl's decoupled mode keep rejected tokens in the denominator: "all".
- AReaL's k1 and k3 are those of the inverse ratio to verl's.
- slime's shipped MIS truncates, rejects the same tokens that it truncated, vetoes, and normalises over all of
  them.
"""

from __future__ import annotations

import math

from jaxfp8rl.errors import ConfigError, nearest
from jaxfp8rl.losses.correction_config import (
    AdaptiveMix,
    Aggregation,
    CorrectionConfig,
    Level,
    Rejection,
    Statistic,
    Weight,
)
from jaxfp8rl.other_names import value_here

NONE = CorrectionConfig(weight="none")
VERL_GEO = Rejection("sequence", "k1", "mean", math.log(0.999), math.log(1.001), inverse=True)
VERL_K3 = Rejection("sequence", "k3", "mean", upper=0.01)
SLIME_VETO = Rejection("sequence", "ratio", "min", lower=1e-4, clamp=False)
TOKEN_ICEPOP = CorrectionConfig(action="mask", lower=0.5, upper=5.0)
NEMO = CorrectionConfig(upper=math.inf, overflow="zero", denominator="all")
SLIME_MIS = CorrectionConfig(
    rejections=(Rejection("token", "ratio", lower=0.5, upper=2.0), SLIME_VETO), batch_normalize=True,
    denominator="all"
)
SKYRL_GEO = Rejection("sequence", "ratio", "mean", 0.99, 1.01, clamp=False)
SKYRL_OUTLIERS = Rejection("sequence", "ratio", "min",
                           lower=1e-4), Rejection("sequence", "ratio", "max", upper=100.0)
SKYRL_TOKENS = Rejection("token", "ratio", lower=0.5, upper=2.0)
AREAL = CorrectionConfig(action="mask", upper=5.0, denominator="all")


def _slime(level: Weight, statistic_of: Aggregation, **fields) -> CorrectionConfig:
    """slime's MIS for whole sequences: bounds [0.5, 2] on the sequence's ratio; sums are clamped after the
    summation."""
    bounds = Rejection("sequence", "ratio", statistic_of, 0.5, 2.0, clamp=False)
    return SLIME_MIS._replace(weight=level, rejections=(bounds, SLIME_VETO), **fields)


def _areal_kl(level: Level, statistic: Statistic, aggregation: Aggregation = "mean") -> CorrectionConfig:
    """AReaL's rejection by a KL estimate: raw token weights; tokens or sequences beyond 5 are dropped."""
    r = Rejection(level, statistic, aggregation, upper=5.0, inverse=statistic == "k3", clamp=False)
    return CorrectionConfig(upper=math.inf, overflow="zero", rejections=(r,), denominator="all")


PRESETS: dict[str, CorrectionConfig] = {
    # the plain names, which docs/corrections.md uses in its recommendations
    "none": NONE,
    "token_tis": CorrectionConfig(),
    "sequence_tis": CorrectionConfig(weight="sequence"),
    "icepop": TOKEN_ICEPOP,
    # one-sided, raw weight ("When Speed Kills Stability")
    "sequence_mis": CorrectionConfig(weight="sequence", action="mask"),
    "geometric_mask": NONE._replace(rejections=(SKYRL_GEO,)),
    # truncation at 2 without sequences beyond 0.001: the best combination in VeXact's ablation (arXiv
    # 2605.14220), which does not name the statistic; k3 is our interpretation
    "vexact": CorrectionConfig(rejections=(Rejection("sequence", "k3", "mean", upper=0.001),)),
    "ais": CorrectionConfig(adaptive=AdaptiveMix()),
    # verl, three policies
    "verl/decoupled_token_is": CorrectionConfig(),
    "verl/decoupled_seq_is": CorrectionConfig(weight="sequence"),
    "verl/decoupled_token_icepop": TOKEN_ICEPOP,
    "verl/decoupled_seq_is_rs": CorrectionConfig(
        weight="sequence",
        rejections=(Rejection("sequence", "k1", "sum", -math.log(2), math.log(2), inverse=True),)
    ),
    "verl/decoupled_geo_rs": NONE._replace(rejections=(VERL_GEO,)),
    "verl/decoupled_geo_rs_seq_tis": CorrectionConfig(weight="sequence", rejections=(VERL_GEO,)),
    "verl/decoupled_geo_rs_token_tis": CorrectionConfig(rejections=(VERL_GEO,)),
    "verl/decoupled_k3_rs": NONE._replace(rejections=(VERL_K3,)),
    "verl/decoupled_k3_rs_seq_tis": CorrectionConfig(weight="sequence", rejections=(VERL_K3,)),
    "verl/decoupled_k3_rs_token_tis": CorrectionConfig(rejections=(VERL_K3,)),
    "verl/disabled": NONE,
    # verl, two policies: loss.old_policy = "rollout"
    "verl/bypass_ppo_clip": NONE._replace(denominator="all"),
    "verl/bypass_ppo_clip_geo_rs": NONE._replace(rejections=(VERL_GEO,), denominator="all"),
    "verl/bypass_ppo_clip_k3_rs": NONE._replace(rejections=(VERL_K3,), denominator="all"),
    "verl/bypass_pg_is": CorrectionConfig(weight="sequence", denominator="all"),
    "verl/bypass_pg_token_icepop": TOKEN_ICEPOP._replace(denominator="all"),
    "verl/bypass_pg_geo_rs": NONE._replace(rejections=(VERL_GEO,), denominator="all"),
    "verl/bypass_pg_geo_rs_seq_tis": CorrectionConfig(weight="sequence", rejections=(VERL_GEO,),
                                                      denominator="all"),
    "verl/bypass_pg_geo_rs_token_tis": CorrectionConfig(rejections=(VERL_GEO,), denominator="all"),
    # NeMo RL
    "nemo/is": NEMO,
    "nemo/tis": NEMO._replace(upper=2.0),
    "nemo/icepop": NEMO._replace(action="mask", lower=0.5, upper=5.0),
    "nemo/seq_mask_tis": NEMO._replace(
        rejections=(Rejection("sequence", "ratio", "mean", 0.999, 1.002, clamp=False),)),
    "nemo/gspo": NEMO._replace(weight="sequence"),
    "nemo/seq_logprob_error": NEMO._replace(  # grpo.seq_logprob_error_threshold beside the plain weight
        rejections=(Rejection("sequence", "mult_error", "mean", upper=2.0, clamp=False),), denominator="kept"
    ),
    # slime. Geometric weights with normalisation raise an error there; here they have no normalisation.
    "slime/tis": CorrectionConfig(denominator="all"),
    # its flags' defaults leave the lower bound at 0
    "slime/icepop": CorrectionConfig(action="mask", denominator="all"),
    "slime/mis": SLIME_MIS,
    "slime/mis_sequence": _slime("sequence", "sum"),
    "slime/mis_geometric": _slime("geometric", "mean", batch_normalize=False),
    "slime/mis_clip": SLIME_MIS._replace(action="clip", lower=0.5),
    "slime/mis_mask": SLIME_MIS._replace(upper=math.inf),
    # AReaL. A sequence's weight is the geometric mean, whatever its statistic aggregates; KL statistics weigh
    # tokens.
    "areal/token_mask": AREAL,
    "areal/token_clamp": AREAL._replace(action="clip"),
    "areal/sequence_mask": AREAL._replace(weight="geometric"),
    "areal/sequence_clamp": AREAL._replace(weight="geometric", action="clip"),
    "areal/token_k1": _areal_kl("token", "k1"),
    "areal/token_k2": _areal_kl("token", "k2"),
    "areal/token_k3": _areal_kl("token", "k3"),
    "areal/sequence_k1": _areal_kl("sequence", "k1"),
    "areal/sequence_k2": _areal_kl("sequence", "k2"),
    "areal/sequence_k3": _areal_kl("sequence", "k3"),
    # tokens masked by ratio stay in the denominator, those dropped by M2 do not
    "areal/m2po": AREAL._replace(m2_limit=0.04, denominator="kept"),
    # SkyRL. "recommended" combines the first and third step of its guide; "guide" has all of them, each
    # applied to the survivors of the previous one.
    "skyrl/token_tis": CorrectionConfig(denominator="all"),
    "skyrl/seq_tis": CorrectionConfig(weight="sequence", upper=5.0, denominator="all"),
    "skyrl/geo_mask": NONE._replace(rejections=(SKYRL_GEO,), denominator="all"),
    "skyrl/recommended": CorrectionConfig(rejections=(SKYRL_GEO,), denominator="all"),
    "skyrl/guide": CorrectionConfig(rejections=(*SKYRL_OUTLIERS, SKYRL_TOKENS, SKYRL_GEO), in_turn=True,
                                    denominator="all"),
    # FlashRL: C = 2 for 0.5B, 8 for 32B
    "flashrl/tis_2": CorrectionConfig(denominator="all"),
    "flashrl/tis_8": CorrectionConfig(upper=8.0, denominator="all"),
    # prime-rl corrects inside its two-policy loss: objective "prime_rl" with loss.old_policy = "rollout"
    "prime_rl/default": NONE._replace(denominator="all"),
}


def get_preset(name: str) -> CorrectionConfig:
    """The correction with this name. Raises ConfigError, which suggests the nearest names."""
    if name not in PRESETS:
        ours = value_here("correction.preset", name, PRESETS)
        hint = f": here it is {ours}" if ours else nearest(name, PRESETS)
        raise ConfigError(f'correction.preset "{name}" does not exist{hint}',
                          "docs/correction_presets.md lists every preset with its arithmetic")
    return PRESETS[name]


def two_policy_only(name: str) -> bool:
    """Whether a preset stands for a two-policy mode: no recomputed old_logp, loss.old_policy = "rollout"."""
    return name.startswith(("verl/bypass_", "prime_rl/"))
