"""Pure functions on arrays for any policy-gradient loop: log-probabilities, advantages, the rollout
correction and the objectives.

    from jaxfp8rl import losses

    advantages = losses.group_advantages([rewards_of_prompt_a, rewards_of_prompt_b], "grpo")  # on the host

    def loss(logp, old_logp, rollout_logp, advantages, mask, segment_ids):                    # jittable
        preset, ppo = losses.get_preset("token_tis"), losses.ObjectiveConfig()
        correction = losses.rollout_correction(old_logp, rollout_logp, mask, preset, segment_ids)
        each, clipped = losses.policy_loss(logp, old_logp, advantages, correction.mask, segment_ids, ppo)
        scale = losses.token_scale(correction.mask, segment_ids, "token_mean")
        return (scale * correction.weights * each).sum()

Arrays are [..., T]: rows of packed sequences. `mask` bool marks the sampled tokens. `segment_ids` int numbers
the sequences of a row, in contiguous runs (a row with one sequence: all ones). Configs are hashable and
static under `jax.jit`. Names are imported on first use: the advantages need only numpy.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxfp8rl.losses.advantages import advantages as group_advantages
    from jaxfp8rl.losses.advantages import informative_groups, overlong_penalty
    from jaxfp8rl.losses.aggregation import token_scale
    from jaxfp8rl.losses.calibration import calibrated_bounds
    from jaxfp8rl.losses.correction import (
        AdaptiveMix,
        Correction,
        CorrectionConfig,
        Rejection,
        rollout_correction,
    )
    from jaxfp8rl.losses.covariance import select_tokens
    from jaxfp8rl.losses.kl import kl_penalty
    from jaxfp8rl.losses.logprobs import logits_logprobs, token_logprobs
    from jaxfp8rl.losses.mismatch import advantage_skew, mismatch_metrics
    from jaxfp8rl.losses.objectives import ObjectiveConfig, off_policy, policy_loss
    from jaxfp8rl.losses.presets import PRESETS, get_preset
    from jaxfp8rl.losses.proximal import proximal_logp
    from jaxfp8rl.losses.selection import Selection

__all__ = [
    "PRESETS", "AdaptiveMix", "Correction", "CorrectionConfig", "ObjectiveConfig", "Rejection", "Selection",
    "advantage_skew", "calibrated_bounds", "get_preset", "group_advantages", "informative_groups",
    "kl_penalty", "logits_logprobs", "mismatch_metrics", "off_policy", "overlong_penalty", "policy_loss",
    "proximal_logp", "rollout_correction", "select_tokens", "token_logprobs", "token_scale",
]
_NAMES = {  # module -> the public names that it holds
    "advantages": ("group_advantages", "informative_groups", "overlong_penalty"),
    "aggregation": ("token_scale",),
    "calibration": ("calibrated_bounds",),
    "correction": ("AdaptiveMix", "Correction", "CorrectionConfig", "Rejection", "rollout_correction"),
    "covariance": ("select_tokens",),
    "kl": ("kl_penalty",),
    "logprobs": ("logits_logprobs", "token_logprobs"),
    "mismatch": ("advantage_skew", "mismatch_metrics"),
    "objectives": ("ObjectiveConfig", "off_policy", "policy_loss"),
    "presets": ("PRESETS", "get_preset"),
    "proximal": ("proximal_logp",),
    "selection": ("Selection",),
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}
# The function is named like its module, and the package cannot use one name for both.
_NAME_THERE = {"group_advantages": "advantages"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxfp8rl.losses' has no attribute {name!r}")
    module = importlib.import_module(f"jaxfp8rl.losses.{_HOMES[name]}")
    return getattr(module, _NAME_THERE.get(name, name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
