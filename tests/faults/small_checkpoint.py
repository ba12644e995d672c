"""A state of some dozen numbers, for the tests of checkpoints."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.types import TrainState


def state(step: int) -> TrainState:
    def values(n: int):
        return jnp.asarray(np.random.default_rng(step).standard_normal((n, 16)), jnp.float32)

    zero = jnp.asarray(np.int32(0))
    fields = {"params": {"w": values(8)}, "opt_state": (values(4), {"m": values(2)}),
              "step": jnp.asarray(step, jnp.int32)}
    return TrainState(**{name: fields.get(name, zero) for name in TrainState._fields if name != "draft"})


LIKE = state(0)


def check(restored, step: int) -> None:
    back, loop = restored
    assert loop["step"] == step and loop["place"] == [step, "ä"]
    jax.tree.map(np.testing.assert_array_equal, back, state(step))


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, state(step), {"place": [step, "ä"]})
