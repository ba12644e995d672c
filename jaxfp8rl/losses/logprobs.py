"""Token log-probabilities and entropy from hidden states, in float32, without materialising all logits [B, T,
V]."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxfp8rl.precision.exact import with_gradient_of
from jaxfp8rl.precision.linear import round_to
from pallas_kernels.logprob import api, parts, reference
from pallas_kernels.logprob.softcap import soft_cap
from pallas_kernels.plgpu_compat import Backend

__all__ = ["logits_logprobs", "logits_of", "parts", "target_logprobs", "token_logprobs", "token_top_k"]
TOP_K_ROWS = 256  # rows whose logits are in memory at a time


def token_logprobs(
    hidden: Float[Array, "B T D"], head: Float[Array, "V D"], tokens: Int[Array, "B T"],
    temperature: float = 1.0, memory: int = api.MEMORY, logits_dtype: str = "float32",
    mask: Bool[Array, "B T"] | None = None, axis_name: str | None = None, backend: Backend = "auto",
    support: Int[Array, "B T K"] | None = None, softcap: float | None = None, exact: bool = False,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """The log-probability of each token given those before it, and the entropy of the distribution it was
    drawn from.

    hidden [B, T, D] (after the final norm), head [V, D], tokens [B, T] -> logp [B, T], entropy [B, T],
    float32. Position t is computed from hidden t - 1; position 0 has no predecessor and is 0. Logits are
    first rounded to `logits_dtype`, as the engine's head rounds them; the gradient ignores the rounding. (A
    bfloat16 logit of 20 is off by up to 0.06.) They are then divided by `temperature`, as the engine does
    before it samples. softcap: each is replaced by softcap * tanh(logit / softcap) before that, unless None.

    support [B, T, K] int: the candidate tokens that each token was drawn from, padded with -1. Both results
    are then those of the distribution over the candidates. None: the whole vocabulary.

    mask [B, T] bool: the tokens to compute; the others are 0 and cost little. axis_name: head is this
    device's part of the vocabulary, in a `shard_map` over that axis. For `memory` (bytes) and `backend` see
    `pallas_kernels.logprob.api` and docs/logprob.md.

    exact: the log-probabilities are those of `pallas_kernels.logprob.parts`, which the embedded engine
    records, bit for bit; their gradient and the entropy are as without. Takes the whole vocabulary on one
    device.
    """
    first = ((0, 0), (1, 0))
    after = lambda x: None if x is None else x[:, 1:]
    logp, entropy = target_logprobs(
        hidden[:, :-1], head, tokens[:, 1:], temperature, memory, logits_dtype, after(mask), axis_name,
        backend,
        after(support), softcap, exact)
    return jnp.pad(logp, first), jnp.pad(entropy, first)


def target_logprobs(
    hidden: Float[Array, "B T D"], head: Float[Array, "V D"], targets: Int[Array, "B T"],
    temperature: float = 1.0, memory: int = api.MEMORY, logits_dtype: str = "float32",
    mask: Bool[Array, "B T"] | None = None, axis_name: str | None = None, backend: Backend = "auto",
    support: Int[Array, "B T K"] | None = None, softcap: float | None = None, exact: bool = False,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`token_logprobs` of any targets: the log-probability [B, T] of targets[:, t] after hidden[:, t], which
    need not be the next token, and the entropy [B, T] of that distribution, float32. All arguments are
    aligned with `hidden`."""
    b, t, d = hidden.shape
    if exact and (support is not None or axis_name or logits_dtype != "float32"):
        raise ValueError("exact log-probabilities are of a whole vocabulary on one device, and of "
                         "logits in float32")
    flat = lambda x: None if x is None else x.reshape(b * t, *x.shape[2:])
    logp, entropy = api.linear_logprob(
        hidden.reshape(-1, d), head.astype(hidden.dtype), targets.reshape(-1), flat(mask),
        temperature=temperature, logits_dtype=jnp.dtype(logits_dtype), axis_name=axis_name, memory=memory,
        backend=backend, support=flat(support), softcap=softcap,
    )
    logp, entropy = logp.reshape(b, t), entropy.reshape(b, t)
    if exact:
        x, w = jax.lax.stop_gradient((hidden.reshape(-1, d), head.astype(hidden.dtype)))
        inverse = 1 / jnp.full(len(x), temperature, jnp.float32)
        of_token = parts.logprobs(x, w, targets.reshape(-1), inverse, softcap=softcap, backend=backend)
        of_token = of_token.reshape(b, t)
        logp = with_gradient_of(of_token if mask is None else jnp.where(mask, of_token, 0.0), logp)
    return logp, entropy


def logits_logprobs(
    logits: Float[Array, "B T V"], tokens: Int[Array, "B T"], temperature: float = 1.0
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """`token_logprobs` for a model that gives logits [B, T, V], those at t for token t + 1: logp and entropy,
    [B, T] float32. Position 0 has no predecessor and is 0. Prefer `token_logprobs`, which never holds all
    logits, where the model gives hidden states. Raises ValueError for a temperature that is not positive."""
    api.check_temperature(temperature)
    logp = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32) / temperature)
    of_token = jnp.take_along_axis(logp, tokens[:, 1:, None], -1)[..., 0]
    entropy = -jnp.sum(jnp.exp(logp) * jnp.where(jnp.isneginf(logp), 0.0, logp), -1)
    first = ((0, 0), (1, 0))
    return jnp.pad(of_token, first), jnp.pad(entropy, first)


def token_top_k(
    hidden: Float[Array, "B T D"], head: Float[Array, "V D"], mask: Bool[Array, "B T"], k: int,
    temperature: float = 1.0, logits_dtype: str = "float32", axis_name: str | None = None,
    softcap: float | None = None,
) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
    """The k likeliest tokens at each position, the likeliest first, with their log-probabilities: ids [B, T,
    k] int32 and logp [B, T, k] float32 at the positions in `mask` [B, T] bool; 0 elsewhere, which costs
    little. The other arguments are those of `token_logprobs`. There is no gradient."""
    api.check_temperature(temperature)
    b, t, d = hidden.shape
    blocks = -(-b * t // TOP_K_ROWS)
    missing = blocks * TOP_K_ROWS - b * t
    # position t is computed from hidden t - 1
    x = jnp.pad(jnp.roll(hidden, 1, axis=1).reshape(-1, d), ((0, missing), (0, 0)))
    live = jnp.pad(mask.at[:, 0].set(False).reshape(-1), (0, missing))

    def of_block(x: Array) -> tuple[Array, Array]:
        z = logits_of(x, head, softcap, logits_dtype) / temperature
        total, (z, ids) = jax.nn.logsumexp(z, -1, keepdims=True), jax.lax.top_k(z, k)
        if axis_name:  # the k best among the k best of every device
            ids += jax.lax.axis_index(axis_name) * head.shape[0]
            total, z, ids = (jax.lax.all_gather(a, axis_name, axis=-1, tiled=True) for a in (total, z, ids))
            (z, at), total = jax.lax.top_k(z, k), jax.nn.logsumexp(total, -1, keepdims=True)
            ids = jnp.take_along_axis(ids, at, -1)
        return ids, z - total

    def one(block: tuple[Array, Array]) -> tuple[Array, Array]:
        x, live = block
        nothing = lambda x: (jnp.zeros((len(x), k), jnp.int32), jnp.zeros((len(x), k), jnp.float32))
        ids, logp = jax.lax.cond(live.any(), of_block, nothing, x)
        return jnp.where(live[:, None], ids, 0), jnp.where(live[:, None], logp, 0.0)

    found = jax.lax.map(one, (x.reshape(blocks, TOP_K_ROWS, d), live.reshape(blocks, TOP_K_ROWS)))
    return tuple(a.reshape(-1, k)[: b * t].reshape(b, t, k) for a in found)


def logits_of(hidden: Array, head: Array, softcap: float | None = None, dtype: str = "float32") -> Array:
    """hidden [..., D], head [V, D] -> logits [..., V] float32, rounded to `dtype` and capped as in
    `token_logprobs`."""
    rounded = functools.partial(round_to, dtype=dtype)
    z = rounded(reference.logits(hidden, head.astype(hidden.dtype)))
    return z if softcap is None else soft_cap(z, softcap, rounded)[0]
