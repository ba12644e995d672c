"""Token log-probabilities and entropy from hidden states, in float32, without ever holding all logits [B, T, V]."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pallas_kernels.logprob import api, reference
from pallas_kernels.plgpu_compat import Backend


def token_logprobs(
    hidden: Array, head: Array, tokens: Array, temperature: float = 1.0, memory: int = api.MEMORY,
    logits_dtype: str = "float32", mask: Array | None = None, axis_name: str | None = None, backend: Backend = "auto",
) -> tuple[Array, Array]:  # fmt: skip
    """Log-probability of each token given those before it, and the entropy of the distribution it was drawn from.

    hidden [B, T, D] (after the final norm), head [V, D], tokens [B, T] -> logp [B, T], entropy [B, T], float32. Position t
    is computed from hidden t - 1; position 0 has no predecessor and is 0. Logits are divided by `temperature`, as the
    engine does before it samples, after the rounding to `logits_dtype` that the engine's head leaves them with (which the
    gradient passes by): a bfloat16 logit of 20 is off by up to 0.06.

    mask [B, T] bool: the tokens to compute; others are 0 and cost little. `axis_name`: head is this device's part of the
    vocabulary, in a `shard_map` over that axis. How, `memory` (bytes) and `backend`: `pallas_kernels.logprob.api`, and
    docs/logprob.md.
    """
    b, t, d = hidden.shape
    logp, entropy = api.linear_logprob(
        hidden[:, :-1].reshape(-1, d), head.astype(hidden.dtype), tokens[:, 1:].reshape(-1),
        None if mask is None else mask[:, 1:].reshape(-1), temperature=temperature, logits_dtype=logits_dtype,
        axis_name=axis_name, memory=memory, backend=backend,
    )  # fmt: skip
    first = ((0, 0), (1, 0))
    return jnp.pad(logp.reshape(b, t - 1), first), jnp.pad(entropy.reshape(b, t - 1), first)


def logits_of(hidden: Array, head: Array) -> Array:
    """hidden [..., D], head [V, D] -> logits [..., V] float32."""
    return reference.logits(hidden, head.astype(hidden.dtype))
