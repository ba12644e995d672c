"""Logit sharpness: how much the loss of a token can rise when its logits are wrong by a little.

In the spirit of "To FP8 and Back Again" (arXiv 2405.18710), which perturbs the logits of the last token
instead of the weights and saw the measure rise before the loss did. The exact form here is ours: Keskar et
al. 2017 (equation 4) applied to the logits z of each sampled token y, with loss L(z) = logsumexp(z) - z_y,

    phi = 100 (max L(z + d) - L(z)) / (1 + L(z))        over |d_j| <= epsilon (|z_j| + 1)

L increases in every z_j except z_y, in which it decreases, so the maximum is exactly at
d_j = epsilon (|z_j| + 1) and d_y = -epsilon (|z_y| + 1).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.losses.logprobs import logits_of
from jaxfp8rl.losses.mismatch import mean_over
from pallas_kernels.logprob.api import check_temperature

EPSILON = 1e-3  # Keskar et al.'s larger box
CHUNK_ELEMENTS = 2**25  # maximal logits in memory at once; each of a few copies has 128 MiB


def logit_sharpness(
    hidden: Array, head: Array, tokens: Array, mask: Array, temperature: float = 1.0,
    epsilon: float = EPSILON,
    chunk_elements: int = CHUNK_ELEMENTS, softcap: float | None = None,
) -> Array:
    """The mean of phi over the tokens in `mask`, a float32 scalar, in percent of 1 + loss.

    hidden [B, T, D] (after the final norm), head [V, D], tokens and mask [B, T]. As in `token_logprobs`, the
    logits of position t come from hidden state t - 1, are capped and are divided by `temperature`, and the
    logits of all tokens are never in memory at once.
    """
    check_temperature(temperature)
    inputs, targets, live = hidden[:, :-1].reshape(-1, hidden.shape[-1]), tokens[:, 1:].reshape(-1), mask[
        :, 1:].reshape(-1)
    chunk = max(1, min(len(targets), chunk_elements // head.shape[0]))
    chunks = jax.tree.map(lambda a: _split(a, chunk), (inputs, targets))
    logits = lambda x: logits_of(x, head, softcap) / temperature
    phi = jax.lax.map(lambda x: sharpness_of(logits(x[0]), x[1], epsilon), chunks)
    return mean_over(live, phi.reshape(-1)[: len(live)])


def sharpness_of(logits: Array, targets: Array, epsilon: float = EPSILON) -> Array:
    """phi of each row: logits [..., V] float32, targets [...] -> [...]."""
    chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
    worst = logits + jnp.where(chosen, -epsilon, epsilon) * (jnp.abs(logits) + 1)
    loss, raised = (-jnp.sum(jnp.where(chosen, jax.nn.log_softmax(z), 0), -1) for z in (logits, worst))
    return 100 * (raised - loss) / (1 + loss)


def _split(a: Array, chunk: int) -> Array:
    """[n, ...] -> [ceil(n / chunk), chunk, ...], padded with zeros."""
    pads = [(0, -len(a) % chunk)] + [(0, 0)] * (a.ndim - 1)
    return jnp.pad(a, pads).reshape(-1, chunk, *a.shape[1:])
