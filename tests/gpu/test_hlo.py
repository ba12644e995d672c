"""What XLA compiles of a learner with the Hopper kernels: nothing quantised twice, read back from codes or
turned in vain."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from layer_program import BATCH, KERNELS, MODEL, PRECISION, TURNED, gradients, kernels, shapes  # noqa: E402

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.decoder_layer import DecoderLayer
from jaxfp8rl.models.layers import rope_tables
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import embed
from jaxfp8rl.policy.hardware import products_of
from jaxfp8rl.policy.policy import grad_slots, policy_of
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.linear import linear

FP8 = r"f8e4m3fn\[([\d,]+)\]"


@pytest.fixture(scope="module")
def compiled():
    try:
        products_of("pallas", "bfloat16")
    except ConfigError as e:
        pytest.skip(str(e))
    return rounding_exact_jit(gradients).lower(*shapes()).compile()


@pytest.fixture(scope="module")
def text(compiled) -> str:
    return compiled.as_text()


def of_codes(text: str) -> Counter:
    """(operation, shape) of what makes arrays of codes, but for kernels and for what moves nothing."""
    made = re.findall(rf" = {FP8}\S* ([\w-]+)\(", text)
    free = {"parameter", "bitcast", "get-tuple-element", "custom-call"}
    return Counter((op, tuple(map(int, shape.split(",")))) for shape, op in made if op not in free)


def test_an_input_is_quantised_once_for_all_who_read_it(text):
    assert len(kernels(text)) == KERNELS


def test_codes_never_become_numbers(text):
    types = dict(re.findall(r"%?([\w.-]+) = ((?:f8\w+|f32|bf16)\[[\d,]*\])", text))
    read = [types.get(name, "") for name in re.findall(r" = (?:f32|bf16|f16)\S* convert\(%?([\w.-]+)", text)]
    assert read and not [t for t in read if t.startswith("f8")]


def test_of_codes_only_a_layers_weights_are_moved_and_turned_once(text):
    """Out of the stack of layers, and in the backward turned for dgrad. Not the stack, which would be held
    beside the first."""
    found = of_codes(text)
    print(*sorted(found.items()), sep="\n")
    tokens, layers = int(np.prod(BATCH)), MODEL.num_hidden_layers
    assert not [key for key in found if tokens in key[1]], "codes of activations are moved"
    turned = {key: n for key, n in found.items() if key[0] in ("transpose", "copy")}
    assert sum(turned.values()) == len(TURNED) and all(layers not in shape for _, shape in turned), turned


@pytest.fixture(scope="module")
def args() -> tuple:
    policy = rounding_exact_jit(policy_of, static_argnums=1)(init_params(MODEL, jax.random.key(0)), PRECISION)
    tokens = jax.random.randint(jax.random.key(1), BATCH, 0, MODEL.vocab_size)
    positions = jnp.broadcast_to(jnp.arange(BATCH[1]), BATCH)
    return policy, grad_slots(policy, "bfloat16"), tokens, positions, jnp.ones_like(tokens)


def test_it_runs_and_repeats_itself(compiled, args):
    """But for the embedding's gradient, which XLA adds up by atomic additions."""
    (value, tree), (again, other) = compiled(*args), compiled(*args)
    for a, b in zip(*map(jax.tree.leaves, ((value, tree["layers"]), (again, other["layers"])))):
        assert np.isfinite(np.asarray(a, np.float32)).all()
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_a_layer_without_attention_is_that_of_the_tensor_cores_by_xla(args):
    """To the last bit, product by product; where SwiGLU is in the quantiser, too. Attention is left to
    cuBLAS, which chooses its kernels, and so the order of its sums, for each program anew."""
    policy, _, tokens, positions, _ = args
    attend = lambda q, k, v: ((q + k * v).astype(q.dtype), None)

    def layer(policy, precision, product):
        weights = jax.tree.map(lambda w: w[0], policy["layers"][0])
        rope = rope_tables(positions, MODEL.kinds[0].rope, MODEL.head_dim, precision.rounding.rope_dtype)
        x = embed(policy, tokens, MODEL, precision)
        return DecoderLayer(MODEL, precision, precision.runs[0], rope, attend, product)(x, weights)[0]

    run = rounding_exact_jit(layer, static_argnums=(1, 2))
    want = run(policy, dataclasses.replace(PRECISION, products="tensor_core"), None)
    for product in (None, lambda name, *args: linear(*args)):
        np.testing.assert_array_equal(run(policy, PRECISION, product), want)
