"""Every public function of pallas_kernels refuses a wrong rank, shape or dtype, and says what it found and
what it wants."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import plan_groups

E4M3, F32, BF16, I32 = jnp.float8_e4m3fn, jnp.float32, jnp.bfloat16, jnp.int32
NK = (((1,), (1,)), ((), ()))


def a(*shape: int, dtype=F32) -> jax.Array:
    return jnp.ones(shape, dtype)


def groups():
    """200 sorted rows of two experts, in 384 padded rows."""
    return plan_groups(jnp.array([150, 50], I32), 200)


CODES = dict(x=lambda: a(8, 256, dtype=E4M3), x_scale=lambda: a(8, 2), w=lambda: a(128, 256, dtype=E4M3),
             w_scale=lambda: a(1, 2))


def product(**wrong: jax.Array) -> list[jax.Array]:
    """Operands of `blockwise_matmul`, of which some are replaced."""
    return [wrong[name] if name in wrong else make() for name, make in CODES.items()]


def grouped(**wrong) -> list:
    """Operands of `grouped_matmul`, of which some are replaced."""
    right = dict(x=a(384, 128, dtype=E4M3), x_scale=a(384, 1), w=a(2, 128, 128, dtype=E4M3),
                 w_scale=a(2, 1, 1), groups=groups())
    return list((right | wrong).values())


def decode(**wrong) -> list[jax.Array]:
    right = dict(q=a(2, 4, 64), k=a(3, 16, 2, 64), v=a(3, 16, 2, 64), table=a(2, 2, dtype=I32),
                 lengths=a(2, dtype=I32))
    return list((right | wrong).values())


# name: (what is wrong, its arguments, what is said)
REFUSED: dict[str, list[tuple[str, Callable[[], list], str]]] = {
    "fp8_dot_general": [
        ("dtype", lambda: [a(8, 128, dtype=I32), a(64, 128), NK], r"lhs is int32\[8, 128\]"),
        ("codes", lambda: [a(8, 128), a(64, 128, dtype=E4M3), NK], "codes already"),
        ("empty", lambda: [a(0, 128), a(64, 128), NK], "empty: there is nothing to multiply"),
    ],
    "fp8_linear": [
        ("rank", lambda: [a(8, 128), a(2, 64, 128)], r"expected x \[\.\.\., K\] and w \[N, K\]"),
        ("dtype", lambda: [a(8, 128, dtype=I32), a(64, 128)], "bfloat16, float16 or float32"),
    ],
    "quantize_rows": [
        ("rank", lambda: [a()], r"0 axes, expected one or more"),
        ("dtype", lambda: [a(8, 128, dtype=I32)], "is int32: bfloat16 or float32 is quantised"),
        ("codes' dtype", lambda: [a(8, 128), BF16], "codes of type bfloat16"),
        ("empty", lambda: [a(0, 128)], "empty: there is nothing to quantise"),
    ],
    "quantize_tokens": [
        ("rank", lambda: [a(2, 8, 128)], "3 axes, expected 2"),
        ("dtype", lambda: [a(8, 128, dtype=jnp.float16)], "is float16: bfloat16 or float32"),
    ],
    "quantize_blocks": [
        ("rank", lambda: [a(128)], "1 axes, expected 2"),
        ("dtype", lambda: [a(128, 128, dtype=I32)], "is int32: bfloat16 or float32"),
    ],
    "dequantize_rows": [
        ("rank", lambda: [a(dtype=E4M3), a()], "of 1 or more axes"),
        ("dtype", lambda: [a(8, 256), a(8, 2)], "float8_e4m3fn or float8_e5m2"),
        ("scale", lambda: [a(8, 256, dtype=E4M3), a(8, 3)], r"these codes have scales float32\[8, 2\]"),
        ("scale's dtype", lambda: [a(8, 256, dtype=E4M3), a(8, 2, dtype=BF16)], r"scales float32\[8, 2\]"),
    ],
    "dequantize_blocks": [
        ("rank", lambda: [a(256, dtype=E4M3), a(2)], "of 2 or more axes"),
        ("dtype", lambda: [a(128, 256), a(1, 2)], "float8_e4m3fn or float8_e5m2"),
        ("scale", lambda: [a(128, 256, dtype=E4M3), a(128, 2)], r"scales float32\[1, 2\]"),
    ],
    "blockwise_matmul": [
        ("rank", lambda: product(x=a(2, 8, 256, dtype=E4M3)), "of two axes"),
        ("dtype", lambda: product(x=a(8, 256)), r"x_codes is float32\[8, 256\]"),
        ("scale", lambda: product(w_scale=a(2, 2)), r"128x128 blocks has float32\[1, 2\]"),
        ("contraction", lambda: product(w=a(128, 128, dtype=E4M3), w_scale=a(1, 1)), "must be equal"),
    ],
    "wgrad": [
        ("rank", lambda: [a(256, dtype=E4M3), a(2), a(8, 256, dtype=E4M3), a(8, 2)], "of two axes"),
        ("scale", lambda: [a(8, 256, dtype=E4M3), a(8, 1), a(8, 256, dtype=E4M3), a(8, 2)],
         r"1x128 blocks has float32\[8, 2\]"),
    ],
    "plan_groups": [
        ("rank", lambda: [a(2, 2, dtype=I32), 4], "one integer per expert"),
        ("dtype", lambda: [a(2), 4], "one integer per expert"),
        ("rows", lambda: [a(2, dtype=I32), 0], "there is nothing to group"),
    ],
    "pad_rows": [
        ("rank", lambda: [a(), groups()], "these groups have 200 sorted rows"),
        ("rows", lambda: [a(199, 8), groups()], r"x is float32\[199, 8\]: these groups have 200 sorted rows"),
    ],
    "unpad_rows": [
        ("rank", lambda: [a(), groups()], "these groups have 384 padded rows"),
        ("rows", lambda: [a(200, 8), groups()], "these groups have 384 padded rows"),
    ],
    "grouped_matmul": [
        ("rank", lambda: grouped(w=a(128, 128, dtype=E4M3)), "of 3 axes"),
        ("dtype", lambda: grouped(x=a(384, 128)), r"x_codes is float32\[384, 128\]"),
        ("rows", lambda: grouped(x=a(200, 128, dtype=E4M3)), "use pad_rows"),
        ("experts", lambda: grouped(w=a(3, 128, 128, dtype=E4M3)), "has 3 experts, groups have 2"),
        ("scale", lambda: grouped(x_scale=a(384, 2)), r"x_scale .* have float32\[384, 1\]"),
    ],
    "packed_attention": [
        ("rank", lambda: [a(8, 64), a(8, 64), a(8, 64), a(8, dtype=I32)], r"q \[T, H, d\]"),
        ("heads", lambda: [a(8, 3, 64), a(8, 2, 64), a(8, 2, 64), a(8, dtype=I32)], "so K divides H"),
        ("dtypes", lambda: [a(8, 2, 64), a(8, 2, 64, dtype=BF16), a(8, 2, 64), a(8, dtype=I32)],
         "of one floating-point type"),
        ("segments", lambda: [a(8, 2, 64), a(8, 2, 64), a(8, 2, 64), a(8)], "segment_ids is int32"),
    ],
    "paged_decode_attention": [
        ("rank", lambda: decode(q=a(2, 64)), r"q \[B, H, d\]"),
        ("heads", lambda: decode(q=a(2, 3, 64)), "so K divides H"),
        ("dtype", lambda: decode(q=a(2, 4, 64, dtype=I32)), "floating-point types"),
        ("table", lambda: decode(table=a(3, 2, dtype=I32)), r"block_table \[B, max_pages\]"),
        ("lengths", lambda: decode(lengths=a(2)), "are int32"),
    ],
    "linear_logprobs": [
        ("rank", lambda: [a(2, 8, 64), a(32, 64), a(8, dtype=I32)], r"expected x \[M, K\] and w \[N, K\]"),
        ("dtypes", lambda: [a(8, 64), a(32, 64, dtype=BF16), a(8, dtype=I32)], "expected one dtype of"),
        ("targets", lambda: [a(8, 64), a(32, 64), a(8)], r"expected an integer per row of x, \[8\]"),
        ("live", lambda: [a(8, 64), a(32, 64), a(8, dtype=I32), np.ones(7, bool)], r"a bool per row of x"),
    ],
}


def test_every_public_name_is_in_the_table():
    assert REFUSED.keys() == set(pallas_kernels.__all__)


@pytest.mark.parametrize(("name", "args", "said"),
                         [pytest.param(name, args, said, id=f"{name}: {what}")
                          for name, cases in REFUSED.items() for what, args, said in cases])
def test_what_is_wrong_is_refused_with_what_was_found_and_the_rule(name, args, said):
    with pytest.raises(ValueError, match=said):
        getattr(pallas_kernels, name)(*args())
