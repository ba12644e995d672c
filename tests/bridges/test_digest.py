"""The digest of a tensor's bytes: the same by every road, another for any change that a publish could make by
accident."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from bridges.api import ParamMeta
from bridges.proof import byte_digest
from bridges.proof.digest import checked_row_digests, joined, stack_digests, tensor_digests, torch_words
from bridges.sources.array_source import random_source
from bridges.transports.vllm_slots import live_digests

SHAPES = [(7,), (5, 3), (257, 520)]  # the last in two kernels
TYPES = ["float8_e4m3fn", "bfloat16", "float32"]
SOME = [(SHAPES[0], "bfloat16"), (SHAPES[1], "float32"), (SHAPES[2], "float8_e4m3fn")]
ROADS = [r if r in SOME else pytest.param(*r, marks=pytest.mark.slow)
         for r in itertools.product(SHAPES, TYPES)]


def random_bytes(shape, dtype: str, seed: int = 0) -> jnp.ndarray:
    size = jnp.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 256, (*shape[:-1], shape[-1] * size), np.uint8)
    return jnp.asarray(raw.view(jnp.dtype(dtype)))


def digest(array) -> tuple[int, int]:
    return tuple(np.asarray(tensor_digests([array]))[0].tolist())


def oracle(array) -> tuple[int, int]:
    """The formula of the module's docstring, with Python's integers."""
    raw = np.asarray(array).view(np.uint8).reshape(-1, array.shape[-1] * array.dtype.itemsize)
    words = np.pad(raw, [(0, 0), (0, -raw.shape[1] % 4)]).view("<u4").reshape(-1)
    a = b = 0
    for p, w in enumerate(map(int, words)):
        k = (p * 0x9E3779B1 + 0x7F4A7C15) % 2**32
        k = (k ^ k >> 15) * 0x85EBCA6B % 2**32
        a += w * (k | 1)
        b += (w << 16 | w >> 16) * ((k << 16 | k >> 16) | 1)
    return a % 2**32, b % 2**32


@pytest.mark.parametrize(("shape", "dtype"), ROADS, ids=str)
def test_every_road_gives_the_formula(shape, dtype):
    array = random_bytes(shape, dtype)
    want = oracle(array)
    words = torch_words(torch.from_numpy(np.array(array).view(np.uint8)).view(getattr(torch, dtype)))
    assert digest(array) == digest(words) == want
    stack = jnp.stack([random_bytes(shape, dtype, 1), array])
    assert tuple(np.asarray(stack_digests(stack))[1].tolist()) == want
    rows = words.shape[0]
    twice = jnp.concatenate([words, words])
    found = np.asarray(checked_row_digests([jnp.stack([twice, twice])],
                                           (((0, rows, False), (rows, 2 * rows, False)),)))
    assert found.tolist() == [[*want, 0]] * 4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 63), st.integers(0, 63), st.integers(0, 7))
def test_a_bit_a_swap_and_a_shift_are_seen(row, column, bit):
    before = np.array(random_bytes((64, 64), "float8_e4m3fn").view(jnp.uint8))
    want = digest(jnp.asarray(before))
    flipped, swapped = before.copy(), before.copy()
    flipped[row, column] ^= 1 << bit
    swapped[[row, (row + 1) % 64]] = swapped[[(row + 1) % 64, row]]
    for changed in (flipped, swapped, np.roll(before, 1, 0), np.roll(before, 4, 1), before.T.copy()):
        have = digest(jnp.asarray(changed))
        assert have[0] != want[0] and have[1] != want[1]


def test_digests_are_spread():
    """Of 4,000 tensors of a single bit none has the digest of another."""
    bits = (np.uint32(1) << np.arange(32, dtype=np.uint32))[np.arange(4000) % 32][:, None]
    table = np.asarray(stack_digests(jnp.asarray(bits * (np.arange(125) == np.arange(4000)[:, None] // 32))))
    assert len({tuple(row) for row in table.tolist()}) == 4000


@pytest.mark.parametrize("bad", [0.0, -0.0, -1.0, np.inf, -np.inf, np.nan])
def test_a_scale_that_is_not_positive_and_finite_is_counted(bad):
    scales = np.full((6, 4), 2.0**-120, np.float32)
    scales[4, 1] = bad
    words = torch_words(torch.from_numpy(scales))
    found = np.asarray(checked_row_digests([words[None]], (((0, 3, True), (3, 6, True), (3, 6, False)),)))
    assert found[:, 2].tolist() == [0, 1, 0]


def test_tables_are_joined_in_order():
    a, b = tensor_digests([jnp.ones((2, 4))]), stack_digests(jnp.ones((3, 4)))
    assert np.array_equal(joined([a, b]), np.concatenate([a, b]))


def test_tensors_of_an_engine_are_stacked_with_their_like():
    """Equal shapes of two types, vectors and single numbers: what Marlin holds of weights in NVFP4."""
    torch.manual_seed(0)
    tensors = {}
    for layer in ("q_proj", "o_proj"):
        tensors |= {f"{layer}.weight": torch.randint(-2**31, 2**31, (8, 16), dtype=torch.int32),
                    f"{layer}.weight_scale": torch.randn(8, 16).to(torch.float8_e4m3fn),
                    f"{layer}.weight_global_scale": torch.rand(()), f"{layer}.bias": torch.randn(6)}
    want = [digest(torch_words(t if t.dim() else t[None])) for t in tensors.values()]
    assert [tuple(row) for row in live_digests(tensors).tolist()] == want


BY_THE_KERNEL = """
import numpy as np, torch
from bridges.proof import byte_digest
from bridges.proof.digest_kernel import BLOCK, STEPS, Region, Regions

draw = np.random.default_rng(0)
def tensor(dtype, *shape):
    raw = draw.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype).reshape(shape)

long = tensor(torch.float32, BLOCK * STEPS + 5)
tensors = [tensor(torch.float8_e4m3fn, 16, 128), tensor(torch.bfloat16, 3, 7), tensor(torch.float32), long,
           torch.tensor([[1.0, 0.0, -0.0, -1.0, float("inf"), float("nan"), 1e-40]])]
scales = [False] * 4 + [True]
read = Regions([Region(t, i, scale=x) for i, (t, x) in enumerate(zip(tensors, scales))])
want = byte_digest.reader(tensors, scales)()
assert read.copied and want[4, 2] == 5
assert (read.read().numpy().view(np.uint32) == want).all()
whole = tensor(torch.bfloat16, 6, 64)
cut = ((0, 6), (0, 64))
parts = [((a, b), (c, d)) for a, b in ((0, 2), (2, 6)) for c, d in ((0, 16), (16, 64))]
found = Regions([Region(whole[a:b, c:d].contiguous(), 0, byte_digest.place(((a, b), (c, d)), cut, 2))
                 for (a, b), (c, d) in parts]).read()
assert (found.numpy().view(np.uint32)[0, :2] == byte_digest.digest_of(whole)).all()
"""


def test_the_digest_kernel_reads_what_the_host_reads():
    """By Triton's interpreter: several types, rows that are no whole words, several programs, scales that are
    unsound, and parts by rows and columns. Triton decides when it is imported."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", BY_THE_KERNEL], env=environment, check=True)


@pytest.mark.parametrize("dtype, shape", [
    ("float8_e4m3fn", (5,)), ("float8_e4m3fn", (3, 7)), ("bfloat16", (3, 7)), ("bfloat16", (4, 64)),
    ("float32", ()), ("float32", (1,))])
def test_digests_without_jax_equal_those_of_jax(dtype, shape):
    [array] = random_source((ParamMeta("x.weight", dtype, shape),), 3).arrays.values()
    array = np.asarray(array)
    want = np.asarray(tensor_digests([jnp.asarray(array)]))[0]
    tensor = torch.from_numpy(np.atleast_1d(array).view(np.uint8).copy()).view(getattr(torch,
                                                                                       dtype)).reshape(shape)
    assert byte_digest.host_digest(array).tolist() == byte_digest.digest_of(tensor).tolist() == want.tolist()
