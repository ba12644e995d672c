"""FP8 products on a mesh of eight devices equal those of one: to the last bit where sums are exact."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from jaxfp8rl.precision.linear import QuantizedWeight, TrainableWeight
from jaxfp8rl.precision.recipe import Precision
from jaxfp8rl.precision.sharded import Axes, sharded_linear, sharded_of

SHARDED = '''
import functools, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxfp8rl.precision.linear import QuantizedWeight, TrainableWeight, linear
from jaxfp8rl.precision.recipe import Precision
from jaxfp8rl.precision.sharded import Axes, sharded_linear, sharded_of

def mesh(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes))

LAYOUTS = {  # mesh, axes: data and FSDP; the same and tensor parallel; data alone
    "fsdp": (mesh(data=2, fsdp=4), Axes()),
    "tensor": (mesh(data=2, fsdp=2, tensor=2), Axes(split="tensor")),
    "data": (mesh(data=8), Axes(("data",), None)),
}
B, T, K, N = 8, 128, 256, 512  # each device has whole blocks of tokens, and of rows

def integers(shape, seed):
    """Integers with 448 on diagonals: every scale is 1, 17 to 63 are rounded, and sums of products are exact in any order."""
    ints = np.random.default_rng(seed).integers(-63, 64, shape).reshape(-1, shape[-1])
    diagonal = np.add.outer(np.arange(ints.shape[0]), np.arange(ints.shape[1])) % 128 == 0
    return np.where(diagonal, 448, ints).reshape(shape).astype(np.float32)

def normal(shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)

def both(product, precision, x, weight, handle, dy):
    y, pull = jax.vjp(lambda x, h: product(x, TrainableWeight(weight, h), precision, True), x, handle)
    return y, *pull(dy)

def put(mesh, spec, tree):
    return jax.device_put(tree, NamedSharding(mesh, spec))

def passes(layout, precision, draw):
    """(of eight devices, of one, the sharded program's text)"""
    mesh, axes = LAYOUTS[layout]
    x, w, dy = (jnp.asarray(draw(s, i)) for i, s in enumerate([(B, T, K), (N, K), (B, T, N)]))
    weight, handle = QuantizedWeight.of(w), jnp.zeros((N, K))
    one = jax.jit(both, static_argnums=(0, 1))(linear, precision, x, weight, handle, dy)
    rows, out = P(axes.rows), P(axes.tokens, None, axes.split)
    mine = jax.jit(sharded_of(mesh, axes))(put(mesh, rows, w))
    for a, b in zip(mine, weight):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
        assert a.addressable_shards[0].data.shape[0] * np.prod([mesh.shape[r] for r in axes.rows]) == b.shape[0]
    args = put(mesh, P(axes.tokens), x), mine, put(mesh, rows, handle), put(mesh, out, dy)
    program = jax.jit(functools.partial(both, sharded_linear(mesh, axes), precision)).lower(*args).compile()
    eight = program(*args)
    for array, spec in zip(eight, (out, P(axes.tokens), rows)):
        assert array.sharding.is_equivalent_to(NamedSharding(mesh, spec), array.ndim), (array.sharding, spec)
    return eight, one, program.as_text()

assert jax.device_count() == 8
FP8 = {"gradients": "e4m3"}
CASES = [(layout, FP8, integers) for layout in LAYOUTS]
CASES += [("fsdp", FP8, normal), ("fsdp", {}, integers), ("fsdp", FP8 | {"saved_activations": "fp8"}, integers)]
for layout, options, draw in CASES:
    eight, one, text = passes(layout, Precision.uniform(1, **options), draw)
    for a, b in zip(eight, one):
        if draw is integers:
            np.testing.assert_array_equal(a, b, err_msg=f"{layout} {options}")
        else:
            assert np.linalg.norm(a - b) < 1e-6 * np.linalg.norm(b), (layout, options)
    gathers = set(re.findall(r" = [(]?(\\w+)\\[([\\d,]+)\\].* all-gather[(]", text))
    codes = N // LAYOUTS[layout][0].shape.get("tensor", 1), K
    scales = tuple(n // 128 for n in codes)
    sent = {("u8", "%d,%d" % codes), ("f32", "%d,%d" % scales)} if LAYOUTS[layout][1].gathered else set()
    assert gathers == sent, (layout, gathers, sent)  # codes and scales of a weight, and nothing of tokens or of gradients
'''


def test_eight_devices_compute_what_one_does():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=env, capture_output=True, text=True, timeout=300)
    print(done.stdout)
    assert done.returncode == 0, done.stderr[-3000:]


MESH = AbstractMesh((2, 4), ("data", "fsdp"), (AxisType.Auto, AxisType.Auto))


def trainable(n: int, k: int) -> TrainableWeight:
    weight = jax.eval_shape(QuantizedWeight.of, jax.ShapeDtypeStruct((n, k), jnp.bfloat16))
    return TrainableWeight(weight, jax.ShapeDtypeStruct((n, k), jnp.bfloat16))


def test_the_kernels_are_lowered_for_a_devices_own_part():
    precision = Precision.uniform(1, "bfloat16", products="pallas", gradients="e4m3")

    def run(x, weight, dy):
        product = sharded_linear(MESH, Axes())
        y, pull = jax.vjp(lambda x, h: product(x, TrainableWeight(weight.quantized, h), precision, True), x, weight.handle)
        return y, pull(dy)

    x, dy = (jax.ShapeDtypeStruct((8, 128, width), jnp.bfloat16) for width in (256, 512))
    text = jax.jit(run).trace(x, trainable(512, 256), dy).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@mosaic_gpu_v2" in line]
    assert len(calls) == 6
    assert all("128x" in call and "1024x" not in call for call in calls)


@pytest.mark.parametrize(
    ("axes", "shape", "message"),
    [
        (Axes(("rows",)), (512, 256), "the mesh has no axis rows: its axes are data, fsdp"),
        (Axes(("data", "fsdp"), None, "fsdp"), (512, 256), 'tokens lie over "fsdp", so the outputs of a weight cannot be split'),
        (Axes(("data",), None), (512, 256), "nothing lies over axis fsdp of the mesh"),
        (Axes(), (384, 256), r'384 rows of an FP8 weight over "fsdp" of 4 are 96 each: a multiple of 128'),
        (Axes(), (514, 256), '514 rows of a weight do not divide over "fsdp" of 4'),
        (Axes(("data", "fsdp")), (512, 256), '6 rows of tokens do not divide over "data" of 2 and "fsdp" of 4'),
    ],
)
def test_what_does_not_divide_is_refused_when_it_is_traced(axes, shape, message):
    x = jax.ShapeDtypeStruct((6, 128, 256), jnp.float32)
    with pytest.raises(ValueError, match=message):
        run = sharded_linear(MESH, axes)
        jax.eval_shape(lambda x, w: run(x, w, Precision.uniform(1), True), x, trainable(*shape))


def test_layers_are_quantised_where_they_lie():
    with pytest.raises(ValueError, match="320 rows of an FP8 weight"):
        jax.eval_shape(sharded_of(MESH, Axes()), jax.ShapeDtypeStruct((3, 320, 128), jnp.float32))
    out = jax.eval_shape(sharded_of(MESH, Axes()), jax.ShapeDtypeStruct((3, 512, 128), jnp.float32))
    assert (out.codes.shape, out.scale.shape) == ((3, 512, 128), (3, 4, 1))
    assert np.dtype(out.codes.dtype).itemsize == 1
