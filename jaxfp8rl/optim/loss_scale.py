"""The loss scale of float16 (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2)."""

from __future__ import annotations

from jaxfp8rl.types import TrainState

FIRST_LOSS_SCALE, LARGEST_LOSS_SCALE, LOSS_SCALE_PATIENCE = 2.0**15, 2.0**16, 200


def first_loss_scale(compute_dtype: str) -> float:
    return FIRST_LOSS_SCALE if compute_dtype == "float16" else 1.0


def rescaled(state: TrainState, compute_dtype: str) -> TrainState:
    """The state of another run, with a loss scale if and only if `compute_dtype` asks for one. It stays in
    the memory that it was in."""
    if bool(state.loss_scale > 1) == (compute_dtype == "float16"):
        return state
    scale = 0 * state.loss_scale + first_loss_scale(compute_dtype)
    return state._replace(loss_scale=scale, good_steps=0 * state.good_steps)
