"""The soft cap of logits (Gemma 2, Riviere et al. 2024, arXiv 2408.00118, section 2): cap tanh(z / cap)."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array


def soft_cap(z: Array, cap: float, rounded: Callable[[Array], Array]) -> tuple[Array, Array]:
    """(cap tanh(z / cap), its derivative by z), of z's shape and dtype. Each of the three steps is `rounded`,
    as transformers and vLLM round them to the type of their logits; the derivative is that without
    roundings."""
    tanh = jnp.tanh(rounded(z / cap))
    return rounded(cap * rounded(tanh)), 1 - tanh * tanh


def check_cap(cap: float | None) -> None:
    """Raise ValueError for a cap that is neither None nor a finite number above 0."""
    if cap is not None and not 0 < cap < math.inf:
        raise ValueError(f"softcap = {cap}: logits are capped at a finite number above 0, or None for no cap")
