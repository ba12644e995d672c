"""Every public function of pallas_kernels has a derivative that is right, or says that it has none wherever
one is computed."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxfp8rl.precision.linear import linear
from jaxfp8rl.precision.records import Precision
from pallas_kernels import four_bits, fp8_dot_general
from pallas_kernels.attention import api as attention
from pallas_kernels.blockwise_matmul import api as matmul
from pallas_kernels.blockwise_matmul import xla
from pallas_kernels.decode_attention import api as decode
from pallas_kernels.decode_attention import packed
from pallas_kernels.dot_general import api as dot_general
from pallas_kernels.few_rows import api as few
from pallas_kernels.fused_quantize import api as fused
from pallas_kernels.grouped_matmul import api as grouped
from pallas_kernels.grouped_matmul import groups, high
from pallas_kernels.logprob import api as logprob
from pallas_kernels.logprob import parts
from pallas_kernels.quantize import api as quantize
from pallas_kernels.quantize import reference

pytestmark = pytest.mark.usefixtures("quick_compile")

X, W = (np.random.default_rng(i).normal(size=(128, 128)).astype(np.float32) for i in (0, 1))
ROWS, BLOCKS, TOKENS = jax.jit(lambda x, w: (
    reference.quantize_rows(x), reference.quantize_blocks(w), reference.quantize_tokens(x)))(X, W)
LAID = groups.plan_groups(jnp.array([128]), 128)
OF_ONE = tuple(a[None] for a in BLOCKS)
IDS = np.ones(128, np.int32)
scale_of = lambda quantized, s: (quantized[0], quantized[1] * s)  # a derivative by a scale is one, too
wide = lambda x: jnp.concatenate([x, x], 1).astype(jnp.bfloat16)

FORWARD_ONLY = {  # name: a function of a float32 [128, 128], and of how to compute it
    quantize.quantize_rows: lambda x, **how: quantize.quantize_rows(x, **how),
    quantize.quantize_tokens: lambda x, **how: quantize.quantize_tokens(x, **how),
    quantize.quantize_both: lambda x, **how: quantize.quantize_both(W, beside=(x,), **how),
    quantize.quantize_blocks: lambda x, **how: quantize.quantize_blocks(x, **how),
    reference.quantize_rows: lambda x: reference.quantize_rows(x),
    reference.quantize_tokens: lambda x: reference.quantize_tokens(x),
    reference.quantize_blocks: lambda x: reference.quantize_blocks(x),
    four_bits.quantize: lambda x: four_bits.quantize(x, "nvfp4").scale,
    four_bits.global_scale: lambda x: four_bits.global_scale(x),
    four_bits.decode: lambda x: four_bits.decode(_int4(x)),
    four_bits.values: lambda x: four_bits.values(_int4(x)),
    four_bits.e4m3: lambda x: four_bits.e4m3(x),
    reference.read_codes: lambda x: reference.read_codes(x.astype(jnp.float8_e4m3fn)),
    matmul.blockwise_matmul: lambda x, **how: matmul.blockwise_matmul(
        *scale_of(ROWS, x[0, 0]), *BLOCKS, **how),
    matmul.matmul_beside: lambda x, **how: matmul.matmul_beside(
        ROWS[0], ROWS[1].T * x[0, 0], (BLOCKS[0],), BLOCKS[1], **how),
    matmul.wgrad: lambda x, **how: matmul.wgrad(*TOKENS, *scale_of(TOKENS, x[0, 0]), **how),
    xla.blockwise_matmul: lambda x: xla.blockwise_matmul(x.astype(jnp.float8_e4m3fn), ROWS[1], *BLOCKS),
    grouped.grouped_matmul: lambda x, **how: grouped.grouped_matmul(
        *ROWS, *scale_of(OF_ONE, x[0, 0]), LAID, **how),
    grouped.grouped_wgrad: lambda x,
    **how: grouped.grouped_wgrad(*scale_of(TOKENS, x[0, 0]), *TOKENS, LAID, **how),
    high.grouped_matmul: lambda x, **how: high.grouped_matmul(
        x.astype(jnp.bfloat16), W[None].astype(jnp.bfloat16), LAID, **how),
    high.grouped_wgrad: lambda x: high.grouped_wgrad(x, X, LAID),
    fused.rms_norm_quantize: lambda x, **how: fused.rms_norm_quantize(W, x[0], 1e-6, **how)[0].rows,
    fused.swiglu_quantize: lambda x, **how: fused.swiglu_quantize(wide(x), **how).rows,
    fused.swiglu_grad_quantize: lambda x, **how: fused.swiglu_grad_quantize(W, wide(x), **how).rows,
    decode.decode_attention: lambda x, **how: _decode(decode.decode_attention, x, **how),
    decode.attention_and_lse: lambda x, **how: _decode(decode.attention_and_lse, x, **how)[1],
    decode.attention_quantize: lambda x, **how: _decode(
        decode.attention_quantize, x, 4, 128, amax_floor=1e-6, **how)[1],
    packed.attention: lambda x, **how: packed.attention(
        *(x.astype(jnp.bfloat16).reshape(64, -1, 64)[:, :n] for n in (2, 1, 1)), jnp.arange(1, 65),
        jnp.ones(1),
        jnp.ones(1), longest=64, **how),
    few.rms_norm: lambda x, **how: few.rms_norm(_wide(x), _wide(x)[0], 1e-6, **how),
    few.add_norm_quantize: lambda x,
    **how: few.add_norm_quantize(_wide(x), _wide(x), _wide(x)[0], 1e-6, **how)[1],
    few.swiglu_quantize: lambda x, **how: few.swiglu_quantize(_wide(x, 1024), **how),
    few.rotate: lambda x, **how: few.rotate(_wide(x).reshape(8, 16, 128), *[jnp.ones((8, 64))] * 2, 4,
                                            jnp.bfloat16, **how),
    parts.statistics: lambda x, **how: parts.statistics(*[_wide(x, 256)] * 2, jnp.ones(64), **how),
    parts.logits: lambda x, **how: parts.logits(*[_wide(x, 256)] * 2, jnp.zeros(64, jnp.int32), **how),
    parts.logprob: lambda x, **how: parts.logprob(x[0], x, x, **how),
    parts.logprobs: lambda x, **how: parts.logprobs(*[_wide(x, 256)] * 2, jnp.arange(64), jnp.ones(64),
                                                    **how),
}
DIFFERENTIABLE = {  # by whom the gradient is checked
    attention.attention: "tests/kernels/test_attention_reference.py",
    attention.attention_and_lse: "test_sm90_attention.py",
    logprob.linear_logprob: "test_sm90_logprob.py", groups.pad_rows: "below", groups.unpad_rows: "below",
    reference.dequantize_rows: "below", reference.dequantize_blocks: "below",
    reference.pad_to_blocks: "below",
    dot_general.fp8_dot_general: "test_dot_general.py", dot_general.fp8_linear: "test_dot_general.py",
}
OF_NO_FLOATS = {groups.plan_groups, groups.padded_rows, decode.plan_of, decode.deal_of, decode.quantizes,
                high.why_reference,
                logprob.why_reference}
OF_NO_FLOATS |= {logprob.check_temperature, attention.not_finite, decode.heads_of, few.rotates,
                 parts.why_reference,
                 packed.tokens_of, packed.places, four_bits.pack, four_bits.unpack, four_bits.e2m1_values,
                 four_bits.e2m1_codes}  # codes are integers
MODULES = [quantize, reference, matmul, xla, grouped, high, groups, fused, decode, attention, logprob,
           dot_general, few, parts, packed, four_bits]
PARTS = {groups.by_block, attention.forward, attention.backward, packed.by_parts}  # of those above
PARTS.add(reference.divide)
PARTS.add(few.rotate_and_write)  # whose caches are written in place, which JAX does not differentiate
PARTS |= {dot_general.only_forward, dot_general.forward, dot_general.backward}


def _wide(x, width=512):
    return x.reshape(-1, width).astype(jnp.bfloat16)


def _int4(x):
    return four_bits.FourBits(jnp.zeros((128, 64), jnp.uint8), x[:, :4].astype(jnp.bfloat16))


def _decode(f, x, heads=1, width=64, **how):
    q = x[:heads, :width].astype(jnp.bfloat16)[None]
    pages = jnp.asarray(X[:16, :width].reshape(2, 8, 1, -1), jnp.bfloat16)
    return f(q, pages, pages, jnp.array([[0, 1]]), jnp.array([9]), **how)


def loss_of(f, **how):
    """A scalar that depends on every result."""
    return lambda x: sum(jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(f(x, **how)))


def product(x):
    """The example of the issue."""
    y = matmul.blockwise_matmul(*quantize.quantize_rows(x), *BLOCKS)
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


@pytest.mark.parametrize("module", MODULES)
def test_every_public_function_is_one_or_the_other(module):
    functions = [f for name, f in inspect.getmembers(module, inspect.isroutine) if not name.startswith("_")]
    own = {f for f in functions if f.__module__ == module.__name__}
    assert not own - FORWARD_ONLY.keys() - DIFFERENTIABLE.keys() - OF_NO_FLOATS - PARTS


@pytest.mark.parametrize("function", FORWARD_ONLY,
                         ids=lambda f: f"{f.__module__.split('.', 1)[1]}.{f.__name__}")
def test_what_has_no_derivative_says_so_by_kernel_and_reference(function):
    f = FORWARD_ONLY[function]
    for how in ({"backend": "reference"},
                {"backend": "pallas"}) if "how" in inspect.signature(f).parameters else ({},):
        loss, jitted = loss_of(f, **how), loss_of(jax.jit(lambda x, how=how: f(x, **how)))
        for derivative in (jax.grad(loss), jax.grad(jitted), jax.jacfwd(loss)):
            with pytest.raises(TypeError,
                               match=r"^pallas_kernels\.\S+ has no derivative: differentiate "
                                     r"(jaxfp8rl|pallas)"):
                jax.jit(derivative).lower(X)


SAID = (r"\.(quantize_rows|blockwise_matmul) has no derivative: "
        r"differentiate pallas_kernels.fp8_dot_general, or")
WHERE = {
    "as it is": lambda f: f,
    "jit": jax.jit,
    "remat": jax.checkpoint,
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (c * 2, f(c)), x, None, length=2)[1].sum(),
    "scan of remat": lambda f: lambda x: lax.scan(jax.checkpoint(lambda c, _: (c + f(c), None)), x, None,
                                                  length=2)[0].sum(),
    "cond": lambda f: lambda x: lax.cond(x[0, 0] > 0, f, jnp.sum, x),
}
DERIVATIVES = {
    "grad": jax.grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "vjp": lambda f: lambda x: jax.vjp(f, x)[1](1.0),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](x),
    "vmap of grad": lambda f: lambda x: jax.vmap(jax.grad(f))(x[None]),
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_however_it_is_asked_for(where, derivative):
    with pytest.raises(TypeError, match=SAID):
        jax.jit(DERIVATIVES[derivative](WHERE[where](product))).lower(X)


@pytest.mark.parametrize("where", WHERE)
def test_what_is_not_asked_for_is_no_error(where):
    """Another argument's gradient, that of what is stopped before or after, of an auxiliary result; and no
    derivative at all."""
    f = WHERE[where](product)
    for g in (
        jax.grad(lambda w: f(jnp.asarray(X)) + jnp.sum(w * W)),
        jax.grad(lambda w: f(lax.stop_gradient(w)) + jnp.sum(w * W)),
        jax.grad(lambda w: lax.stop_gradient(f(w) - jnp.sum(w)) + jnp.sum(w * W)),
        jax.grad(lambda w: (jnp.sum(w * W), f(w)), has_aux=True),
    ):
        program = jax.make_jaxpr(g)(X)
        assert "no_derivative" not in str(program)
    assert jax.eval_shape(f, X).shape == () and jax.eval_shape(jax.vmap(f), X[None]).shape == (1,)


def test_a_straight_through_estimate_around_it_has_its_gradient():
    """x + stop_gradient(rounded(x) - x), differentiated."""
    rounded = lambda x: reference.dequantize_rows(*quantize.quantize_rows(x))
    g = jax.jit(jax.grad(lambda x: jnp.sum((x + lax.stop_gradient(rounded(x) - x)) * W)))(X)
    np.testing.assert_array_equal(g, W)


def test_eagerly_it_is_an_error_too():
    for derivative in ("grad", "jvp", "vjp", "linearize"):
        with pytest.raises(TypeError, match=SAID):
            DERIVATIVES[derivative](product)(X)


@pytest.mark.parametrize("product", [
    lambda x, w: linear(x, w, Precision.uniform(1, "float32"), True),
    lambda x, w: fp8_dot_general(x, w, (((1,), (1,)), ((), ())), backend="reference"),
], ids=["linear", "fp8_dot_general"])
def test_those_that_the_message_names_have_the_gradient_of_straight_through(product):
    """Of x and w as if neither were rounded, at the rounded ones: numpy's, to what FP8 operands allow of the
    backward."""
    f = lambda x, w: jnp.mean(jnp.square(product(x, w)))
    y = np.asarray(reference.dequantize_rows(*ROWS)) @ np.asarray(reference.dequantize_blocks(*BLOCKS)).T
    dy = 2 * y / y.size
    for got, want in zip(jax.grad(f, (0, 1))(X, W), (dy @ W, dy.T @ X)):
        assert np.linalg.norm(got - want) < 0.06 * np.linalg.norm(want)


def test_those_that_have_a_gradient_have_the_right_one():
    laid = groups.plan_groups(jnp.array([2, 0, 3]), 6)
    of = lambda f, x: jax.vjp(f, x)[1]
    rows, padded = X[:6, :3], np.resize(W, (laid.source.size, 3))
    (unpadded,) = of(lambda x: groups.pad_rows(x, laid), rows)(padded)
    (back,) = of(lambda y: groups.unpad_rows(y, laid), padded)(rows)
    np.testing.assert_array_equal(unpadded, np.concatenate([padded[:2], padded[128:131], np.zeros((1, 3))]))
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(back).any(1)), [0, 1, 128, 129, 130])
    codes = np.asarray(BLOCKS[0], np.float32)
    by_scale = of(lambda s: reference.dequantize_rows(BLOCKS[0], s), jnp.ones((128, 1)))(W)[0]
    np.testing.assert_allclose(by_scale[:, 0], (codes * W).sum(1), rtol=1e-5)
    by_scale = of(lambda s: reference.dequantize_blocks(BLOCKS[0], s), jnp.ones((1, 1)))(W)[0]
    np.testing.assert_allclose(by_scale[0, 0], (codes * W).sum(), rtol=1e-5)
    np.testing.assert_array_equal(of(lambda x: reference.pad_to_blocks(x, -1), X[:2, :3])(W[:2])[0],
                                  W[:2, :3])
