"""The losses of the Tinker API, as its documentation defines them: sums over tokens, not means.

logp: the log-probabilities of the target tokens now; `logprobs`: those at which they were sampled;
r = exp(logp - logprobs).

    cross_entropy          - sum weights logp
    importance_sampling    - sum r advantages
    ppo                    - sum min(r advantages, clip(r) advantages)
    cispo                  - sum stop_gradient(clip(r)) advantages logp
    dro                    - sum (advantages logp - beta / 2 (logp - logprobs)^2)

clip(r) = clip(r, clip_low_threshold, clip_high_threshold).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from jaxfp8rl.errors import nearest
from jaxfp8rl.serving.refusal import Refused

CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


class Loss(NamedTuple):
    """of_tokens(logp, inputs, knobs) -> the loss of each token, all [...] float32.

    inputs: the names of its per-token inputs besides `target_tokens`, each with the value that stands for one
    left out, or None where it must be given. knobs: its settings (loss_fn_config) with their defaults, None
    where it must be given.
    """

    of_tokens: Callable[[Array, Mapping[str, Array], Mapping[str, Array]], Array]
    inputs: dict[str, float | None]
    knobs: dict[str, float | None]


def _cross_entropy(logp: Array, inputs: Mapping[str, Array], knobs: Mapping[str, Array]) -> Array:
    return -inputs["weights"] * logp


def _importance_sampling(logp: Array, inputs: Mapping[str, Array], knobs: Mapping[str, Array]) -> Array:
    return -jnp.exp(logp - inputs["logprobs"]) * inputs["advantages"]


def _clipped(ratio: Array, knobs: Mapping[str, Array]) -> Array:
    return jnp.clip(ratio, knobs["clip_low_threshold"], knobs["clip_high_threshold"])


def _ppo(logp: Array, inputs: Mapping[str, Array], knobs: Mapping[str, Array]) -> Array:
    ratio, advantages = jnp.exp(logp - inputs["logprobs"]), inputs["advantages"]
    return -jnp.minimum(ratio * advantages, _clipped(ratio, knobs) * advantages)


def _cispo(logp: Array, inputs: Mapping[str, Array], knobs: Mapping[str, Array]) -> Array:
    weight = jax.lax.stop_gradient(_clipped(jnp.exp(logp - inputs["logprobs"]), knobs))
    return -weight * inputs["advantages"] * logp


def _dro(logp: Array, inputs: Mapping[str, Array], knobs: Mapping[str, Array]) -> Array:
    distance = logp - inputs["logprobs"]
    return -(inputs["advantages"] * logp - 0.5 * knobs["beta"] * distance**2)


SAMPLED: dict[str, float | None] = {"logprobs": None, "advantages": None}
LOSSES = {
    "cross_entropy": Loss(_cross_entropy, {"weights": 1.0}, {}),
    "importance_sampling": Loss(_importance_sampling, SAMPLED, {}),
    "ppo": Loss(_ppo, SAMPLED, dict(CLIP)),
    "cispo": Loss(_cispo, SAMPLED, dict(CLIP)),
    "dro": Loss(_dro, SAMPLED, {"beta": None}),
}
KINDS = tuple(LOSSES)
INPUTS = tuple(dict.fromkeys(name for loss in LOSSES.values() for name in loss.inputs))
KNOBS = tuple(dict.fromkeys(name for loss in LOSSES.values() for name in loss.knobs))


def of_tokens(kind: ArrayLike, logp: Array, inputs: Mapping[str, Array], knobs: Mapping[str, Array]) -> Array:
    """The loss of each token, [...] float32, by the loss's place in KINDS, so that one program computes them
    all. inputs: all of INPUTS, each [...]; knobs: all of KNOBS, scalars. What a loss does not use may hold
    anything."""
    branches = [lambda logp, inputs, knobs,
                f=loss.of_tokens: f(logp, inputs, knobs) for loss in LOSSES.values()]
    return jax.lax.switch(kind, branches, logp, inputs, knobs)


def loss_named(name: str) -> Loss:
    """Raises Refused for a loss that this server does not compute."""
    if name not in LOSSES:
        hint = nearest(name, LOSSES)
        raise Refused(f"loss_fn {name!r}: this server does not compute it{hint if 'did you' in hint else ''}",
                      f"take {', '.join(LOSSES)}, or forward_backward_custom with a function of your own")
    return LOSSES[name]


def knobs_of(name: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """The settings of a loss, those left out at their defaults. Raises Refused for an unknown one, for one
    that is not a finite number, and for one that has no default and is not given."""
    known = loss_named(name).knobs
    for key, value in given.items():
        if key not in known:
            hint = nearest(key, known) if known else " (it has none)"
            raise Refused(f"loss_fn_config.{key}: {name} has no such setting{hint}", "leave it out")
        if not isinstance(value, float | int) or not abs(value) < float("inf"):
            raise Refused(f"loss_fn_config.{key} = {value!r} is not a finite number", f"give {name} a number")
    found = {key: given.get(key, default) for key, default in known.items()}
    if missing := [key for key, value in found.items() if value is None]:
        raise Refused(f"{name} needs loss_fn_config.{missing[0]}, which has no default",
                      f'loss_fn_config={{"{missing[0]}": 0.05}}, say')
    return {key: float(value) for key, value in found.items() if value is not None}
