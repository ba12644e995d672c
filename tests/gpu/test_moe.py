"""A mixture of experts by the Hopper kernels and by XLA: near, deterministic, and whole under every load."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.models.config import Experts
from jaxfp8rl.models.moe import moe_block
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.precision.weights import QuantizedWeight, grad_slots_of, trainable
from pallas_kernels.numerics import relative_l2

pytestmark = pytest.mark.usefixtures("hopper")

EXPERTS, D, T = Experts(16, 4, 256, True), 512, 700
FP8 = Precision((), products="pallas", gradients="e4m3")


def data(fp8: bool):
    rng = np.random.default_rng(0)
    random = lambda *shape: jnp.asarray(0.05 * rng.standard_normal(shape), jnp.bfloat16)
    E, F = EXPERTS.num_experts, EXPERTS.moe_intermediate_size
    experts = {"gate_proj": random(E, F, D), "up_proj": random(E, F, D), "down_proj": random(E, D, F)}
    of = {name: {"weight": QuantizedWeight.of(w) if fp8 else w} for name, w in experts.items()}
    return {"gate": {"weight": random(E, D)}, "experts": of}, 20 * random(1, T, D), 20 * random(1, T, D)


def both(precision: Precision, fp8: bool, routes=None):
    weights, x, dy = data(fp8)

    @rounding_exact_jit
    def run(weights, x, dy):
        f = lambda grad_slots, x: moe_block(x, trainable(weights, grad_slots), EXPERTS, precision, fp8,
                                       routes_BTk=routes)[0]
        y, pull = jax.vjp(f, grad_slots_of(weights, "bfloat16"), x)
        return y, pull(dy)

    return run(weights, x, dy)


@pytest.mark.parametrize(("fp8", "other"), [(True, "float32"), (False, "float32")], ids=["FP8", "BF16"])
def test_kernels_and_xla_are_near(fp8, other):
    got, want = both(FP8, fp8), both(dataclasses.replace(FP8, products=other), fp8)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_l2(a, b) < 2e-2


@pytest.mark.parametrize("fp8", [True, False], ids=["FP8", "BF16"])
def test_twice_the_same_bits_and_idle_experts_get_nothing(fp8):
    routes = jnp.broadcast_to(jnp.asarray([1, 2, 5, 9], jnp.uint8), (1, T, 4))  # all tokens to four experts
    first, second = both(FP8, fp8, routes), both(FP8, fp8, routes)
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    gradients = first[1][0]["experts"]
    idle = jnp.asarray([e for e in range(16) if e not in (1, 2, 5, 9)])
    assert not any(bool(node["weight"][idle].any()) for node in gradients.values())
