"""Token log-probabilities and entropy from hidden states, in float32, without ever holding all logits [B, T, V]."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.precision.linear import round_to

CHUNK_ELEMENTS = 2**25  # logits held at once: 128 MiB in float32


def token_logprobs(
    hidden: Array, head: Array, tokens: Array, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS,
    logits_dtype: str = "float32",
) -> tuple[Array, Array]:  # fmt: skip
    """Log-probability of each token given those before it, and the entropy of the distribution it was drawn from.

    hidden [B, T, D] (after the final norm), head [V, D], tokens [B, T] -> logp [B, T], entropy [B, T], float32. Position t
    is computed from hidden t - 1; position 0 has no predecessor and is 0. Logits are divided by `temperature`, as the
    engine does before it samples, after the rounding to `logits_dtype` that the engine's head leaves them with (which the
    gradient passes by): a bfloat16 logit of 20 is off by up to 0.06. Chunks of tokens are recomputed in the backward pass.
    """
    b, t, d = hidden.shape
    inputs, targets = hidden[:, :-1].reshape(-1, d), tokens[:, 1:].reshape(-1)
    chunk = max(1, min(len(targets), chunk_elements // head.shape[0]))
    missing = -len(targets) % chunk
    inputs = jnp.pad(inputs, ((0, missing), (0, 0))).reshape(-1, chunk, d)
    targets = jnp.pad(targets, (0, missing)).reshape(-1, chunk)
    logp, entropy = jax.lax.map(jax.checkpoint(lambda x: _chunk(*x, head, temperature, logits_dtype)), (inputs, targets))
    kept = b * (t - 1)
    first = ((0, 0), (1, 0))
    return (
        jnp.pad(logp.reshape(-1)[:kept].reshape(b, t - 1), first),
        jnp.pad(entropy.reshape(-1)[:kept].reshape(b, t - 1), first),
    )


def logits_of(hidden: Array, head: Array) -> Array:
    """hidden [..., D], head [V, D] -> logits [..., V] float32."""
    exact = jax.lax.Precision.HIGHEST if hidden.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        hidden, head.astype(hidden.dtype), (((hidden.ndim - 1,), (1,)), ((), ())),
        precision=exact, preferred_element_type=jnp.float32,
    )  # fmt: skip


def _chunk(x: Array, target: Array, head: Array, temperature: float, logits_dtype: str) -> tuple[Array, Array]:
    logits = logits_of(x, head)
    if logits_dtype != "float32":
        logits += jax.lax.stop_gradient(round_to(logits, logits_dtype) - logits)
    logp = jax.nn.log_softmax(logits / temperature)
    return jnp.take_along_axis(logp, target[:, None], -1)[:, 0], -jnp.sum(jnp.exp(logp) * logp, -1)
