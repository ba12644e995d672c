"""A checkpoint that is written while the next updates donate its buffers holds the state that it was asked to
save."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.checkpoint import store
from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.learning import Optim
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import guarded_update, init_state
from jaxfp8rl.precision.jit import rounding_exact_jit
from pallas_kernels.testing import assert_same_bits

UPDATES = 3  # while the save is in flight


def updater(**formats):
    """(state, update(state) -> state, which donates) of 64 MB of parameters."""
    optimizer = make_optimizer(Optim(lr=1e-2, **formats), updates=10)
    params = {"w": jax.random.normal(jax.random.key(0), (4096, 4096)), "b": jnp.ones(4096)}

    def update(state):
        grads = jax.tree.map(lambda p: p.astype(jnp.float32) + 1, state.params)
        return guarded_update(optimizer, state, jnp.float32(1), grads)[0]

    return init_state(params, optimizer), rounding_exact_jit(update, donate_argnums=0)


@pytest.mark.parametrize("formats", [{}, {"offload": True},
                                     {"first_moment": "float8", "second_moment": "bfloat16"}], ids=str)
def test_row_31_updates_that_donate_do_not_reach_the_save_in_flight(tmp_path, monkeypatch, formats):
    held, seal = threading.Event(), store.seal
    monkeypatch.setattr(store, "seal", lambda folder: (held.wait(60), seal(folder))[1])
    state, update = updater(**formats)
    state = update(state)
    want = jax.tree.map(np.array, state)  # copies: pinned host memory is otherwise lent
    checkpoints = Checkpoints(tmp_path / "checkpoints", 2)
    checkpoints.save_async(1, state, {"place": 1})
    for _ in range(UPDATES):
        state = update(state)
    jax.block_until_ready(state)
    held.set()
    checkpoints.wait()
    assert not np.array_equal(want.params["w"], state.params["w"])
    back, _ = checkpoints.restore(state)
    assert_same_bits(jax.tree.map(np.asarray, back), want)
