"""The quantised product and its derivative, and the recipes that say where it is used."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from bridges.api import EngineFormats
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes
from jaxfp8rl.models.known import KNOWN, known_shape
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import forward
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.layer_runs import LayerRun, fp8_runs
from jaxfp8rl.precision.linear import fused_linears, linear, round_to
from jaxfp8rl.precision.recipe import FP8_ACTIVATION, FP8_KV, FP8_WEIGHT, RECIPES, get_recipe, resolve
from jaxfp8rl.precision.records import Gradients, Precision, Products, WgradBlocks
from jaxfp8rl.precision.weights import QuantizedWeight, WeightWithGradSlot
from pallas_kernels.numerics import relative_l2
from pallas_kernels.quantize import reference as q

pytestmark = pytest.mark.usefixtures("quick_compile")

SHAPES = {
    "self_attn.q_proj": (256, 128), "self_attn.k_proj": (128, 128), "self_attn.v_proj": (128, 128),
    "self_attn.o_proj": (128, 256), "mlp.gate_proj": (256, 128), "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}
BF16 = Precision.uniform(1, "bfloat16", gradients="e4m3")
ALL = frozenset(name.split(".")[-1] for name in SHAPES)


def precision_of(activations_fp8: bool, backward_fp8: bool) -> Precision:
    return Precision.uniform(1, activations_fp8=activations_fp8, gradients="e4m3" if backward_fp8 else "high")


@functools.partial(rounding_exact_jit, static_argnums=0)
def product(precision: Precision, x, w, dy):
    """(y, dx, dw) of the FP8 product."""
    y, pull = jax.vjp(lambda x, w: linear(x, w, precision, fp8=True), x, w)
    return y, *pull(dy)


def integers(shape: tuple[int, int], seed: int) -> np.ndarray:
    """Integers up to 63 with 448 on every sixteenth diagonal: each block of 16 or more along either axis has
    scale exactly 1, integers above 16 are rounded, and float32 sums of a few hundred products are exact in
    any order."""
    ints = np.random.default_rng(seed).integers(-63, 64, shape)
    return np.where(np.add.outer(np.arange(shape[0]), np.arange(shape[1])) % 16 == 0, 448,
                    ints).astype(np.float32)


def e4m3(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)


@pytest.mark.parametrize("backward_fp8", [True, False])
@pytest.mark.parametrize("activations_fp8", [True, False])
@pytest.mark.parametrize("tokens", [150, pytest.param(17, marks=pytest.mark.slow)])
def test_products_equal_an_integer_oracle_exactly(tokens, activations_fp8, backward_fp8):
    x, w, dy = integers((tokens, 256), 0), integers((128, 256), 1), integers((tokens, 128), 2)
    rounded, none = e4m3, lambda a: a.astype(np.float64)
    forward_x, backward = rounded if activations_fp8 else none, rounded if backward_fp8 else none
    want = forward_x(x) @ e4m3(w).T, backward(dy) @ e4m3(w), backward(dy).T @ backward(x)
    for got, exact in zip(product(precision_of(activations_fp8, backward_fp8), x, w, dy), want):
        np.testing.assert_array_equal(got, exact)
    assert not np.array_equal(e4m3(x), x)  # the rounding had something to do


def drawn(tokens: int, seed: int = 0):
    """x, w, dy with outlier columns and rows of very different size."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(tokens, 256)) * np.exp2(rng.uniform(-3, 3, (1, 256)))
    dy = rng.normal(size=(tokens, 128)) * np.exp2(rng.uniform(-12, 2, (tokens, 1)))
    return (a.astype(np.float32) for a in (x, rng.normal(size=(128, 256)) / 16, dy))


def known(w) -> jax.Array:
    """What the codes of w stand for."""
    return q.dequantize_blocks(*QuantizedWeight.of(w))


def off(a, b) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("tokens", [1, pytest.param(37, marks=pytest.mark.slow), 300])
def test_the_backward_pass_in_high_precision_is_that_of_the_dequantised_product(tokens):
    x, w, dy = drawn(tokens)
    _, pull = jax.vjp(lambda x, w: jnp.dot(x, w.T, precision="highest"), x, jax.jit(known)(w))
    want_dx, want_dw = pull(dy)
    for activations_fp8 in (True, False):
        _, dx, dw = product(precision_of(activations_fp8, False), x, w, dy)
        assert off(dx, want_dx) < 1e-6 and off(dw, want_dw) < 1e-6


@pytest.mark.parametrize("tokens", [pytest.param(5, marks=pytest.mark.slow),
                                    pytest.param(37, marks=pytest.mark.slow), 300])
def test_the_backward_pass_in_fp8_is_off_by_the_rounding_of_e4m3_and_no_more(tokens):
    """Three mantissa bits: each operand is off by 2^-4 at most and some 2^-5.2 in the root mean square."""
    x, w, dy = drawn(tokens)
    _, dx, dw = product(precision_of(True, True), x, w, dy)
    _, exact_dx, exact_dw = product(precision_of(True, False), x, w, dy)
    assert 1e-3 < off(dx, exact_dx) < 2**-4 and 1e-3 < off(dw, exact_dw) < 2**-3.5


def test_dgrad_uses_the_very_codes_of_the_forward_and_wgrad_blocks_of_tokens():
    x, w, dy = drawn(150)
    _, dx, dw = product(precision_of(True, True), x, w, dy)
    rounded = jax.jit(lambda a: q.dequantize_rows(*q.quantize_rows(a)))
    rows = lambda a: np.asarray(rounded(a), np.float64)
    assert off(dx, rows(dy) @ np.asarray(jax.jit(known)(w), np.float64)) < 1e-6
    assert off(dw, rows(dy.T) @ rows(x.T).T) < 1e-6
    assert off(dw, rows(dy).T @ rows(x)) > 1e-3  # blocks along the features would be another product


def test_wgrad_takes_its_input_in_square_blocks_if_asked_and_is_no_further_off_for_it():
    """Of outlier columns, 2^6 apart, a block's scale is the largest's: E4M3 has digits for the others all the
    same."""
    x, w, dy = drawn(300)
    square = dataclasses.replace(precision_of(True, True), wgrad_inputs="128x128")
    (y, dx, dw), (want_y, want_dx, strips) = product(square, x, w,
                                                     dy), product(precision_of(True, True), x, w, dy)
    np.testing.assert_array_equal(y, want_y), np.testing.assert_array_equal(dx, want_dx)
    rows, blocks = (jax.jit(lambda a, f=f, g=g: f(*g(a))) for f, g in (
        (q.dequantize_rows, q.quantize_rows), (q.dequantize_blocks, q.quantize_blocks)))
    assert off(dw, np.asarray(rows(dy.T), np.float64)
               @ np.asarray(blocks(x.T), np.float64).T) < 1e-6 < off(dw, strips)
    exact = product(precision_of(True, False), x, w, dy)[2]
    assert off(dw, exact) < 1.1 * off(strips, exact)


def test_leading_axes_are_tokens():
    x, w, dy = drawn(300)
    flat = product(precision_of(True, True), x, w, dy)
    folded = product(precision_of(True, True), x.reshape(3, 100, -1), w, dy.reshape(3, 100, -1))
    for a, b in zip(flat, folded):
        assert off(np.asarray(b).reshape(a.shape), a) < 1e-6


@pytest.mark.parametrize("backward_fp8", [True, False])
def test_zeros_give_zeros(backward_fp8):
    x, w, dy = drawn(37)
    for args in ((x, w, 0 * dy), (0 * x, w, dy), (x, 0 * w, dy)):
        y, dx, dw = product(precision_of(True, backward_fp8), *args)
        assert all(np.isfinite(a).all() for a in (y, dx, dw))
        if not args[2].any():
            assert not np.any(dx) and not np.any(dw)
        if not args[0].any():
            assert not np.any(y) and not np.any(dw)


def test_gradients_keep_the_dtypes_of_their_operands():
    x, w, dy = drawn(16)
    p = Precision.uniform(1, compute_dtype="bfloat16", gradients="e4m3")
    y, dx, dw = product(p, x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), dy.astype(jnp.bfloat16))
    assert y.dtype == dx.dtype == dw.dtype == jnp.bfloat16


@pytest.mark.parametrize("options", [{}, {"gradients": "high"}, {"saved_activations": "fp8"}], ids=str)
def test_products_of_one_input_are_one_on_their_way_back(options):
    """Results and gradients of weights to the last bit; the input's gradient is one sum, rounded once, and so
    less off."""
    p = dataclasses.replace(BF16, **options)
    x, *weights = (jax.random.normal(jax.random.key(i), (n, 256), jnp.bfloat16)
                   for i, n in enumerate((150, 256, 128, 200)))
    codes = [QuantizedWeight.of(w) for w in weights]
    dys = tuple(jax.random.normal(jax.random.key(9 + i), (150, len(w)), jnp.bfloat16)
                for i, w in enumerate(weights))

    @functools.partial(rounding_exact_jit, static_argnums=0)
    def run(products, x, grad_slots):
        ys, pull = jax.vjp(lambda x, hs: products(x, [*map(WeightWithGradSlot, codes, hs)]), x, grad_slots)
        return ys, *pull(dys)

    apart = lambda x, ws: tuple(linear(x, w, p, fp8=True) for w in ws)
    together = lambda x, ws: fused_linears(x, ws, p)
    grad_slots = [jnp.zeros(w.shape, jnp.bfloat16) for w in weights]
    (ys, dx, dws), (ours, our_dx, our_dws) = (run(f, x, grad_slots) for f in (apart, together))
    _, exact, _ = run(apart, x.astype(jnp.float32), grad_slots)
    chex.assert_trees_all_equal((ys, dws), (ours, our_dws))
    assert relative_l2(our_dx, exact) < 0.8 * relative_l2(dx, exact)


@pytest.mark.parametrize("widths, groups", [pytest.param((256, 128, 384), 1, marks=pytest.mark.slow),
                                            ((256, 64, 192), 3)])
def test_by_the_kernels_what_comes_back_is_quantised_where_it_lies(widths, groups):
    """Quantise x, three products; x along the tokens; of a group quantise, dgrad, wgrad. A width of 64 shares
    a block of scales with its neighbour: each is a group of its own. Nothing is laid side by side but codes
    of weights."""
    p = dataclasses.replace(BF16, products="pallas")
    x = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
    weights = [jax.eval_shape(QuantizedWeight.of, jax.ShapeDtypeStruct((n, 256), jnp.bfloat16))
               for n in widths]
    grad_slots = [jax.ShapeDtypeStruct(w.codes.shape, jnp.bfloat16) for w in weights]

    def run(x, weights, grad_slots):
        ys, pull = jax.vjp(lambda x, hs: fused_linears(x, [*map(WeightWithGradSlot, weights, hs)], p), x,
                           grad_slots)
        return pull(ys)

    text = jax.jit(run).trace(x, weights, grad_slots).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 4 + 1 + 3 * groups
    assert not re.findall(r"stablehlo\.concatenate .*-> tensor<[\dx]*xbf16>", text)


def test_an_excluded_product_is_a_plain_one():
    x, w, dy = drawn(37)
    y, pull = jax.vjp(lambda x, w: linear(x, w, precision_of(True, True), fp8=False), x, w)
    dx, dw = pull(dy)
    for got, want in ((y, x @ w.T), (dx, dy @ w), (dw, dy.T @ x)):
        assert off(got, want) < 1e-6


def test_the_models_forward_quantises_what_the_runs_name_and_nothing_else():
    """W8A16 equals a plain forward on a tree whose named weights were rounded by hand."""
    model = ModelConfig.from_hf(
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 128,
         "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2,
         "head_dim": 64, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
         "hidden_act": "silu",
         "tie_word_embeddings": True}
    )
    runs = (LayerRun(0, 1, frozenset()), LayerRun(1, 3, ALL - {"o_proj"}))
    params = init_params(model, jax.random.key(0))
    by_hand = jax.tree.map(lambda a: a, params)
    rounded = jax.jit(lambda w: q.dequantize_blocks(*q.quantize_blocks(w)))
    for block, names in (("self_attn", ("q_proj", "k_proj", "v_proj")),
                         ("mlp", ("gate_proj", "up_proj", "down_proj"))):
        for name in names:
            w = params["layers"][block][name]["weight"]
            by_hand["layers"][block][name]["weight"] = w.at[1:].set(rounded(w[1:]))
    tokens = jnp.arange(20)[None] % 32
    args = tokens, jnp.arange(20)[None], jnp.ones_like(tokens)
    run = jax.jit(lambda params, precision: forward(params, model, *args, precision), static_argnums=1)
    got = run(params, Precision(runs, activations_fp8=False, compute_dtype="float32"))
    want, plain = (run(p, Precision.uniform(3)) for p in (by_hand, params))
    assert off(got, want) < 1e-6 < 1e-4 < off(plain, want)


def test_round_to_survives_jit_and_is_the_cast():
    x = jnp.asarray(np.random.default_rng(0).normal(size=1000), jnp.float32)
    want = np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(round_to, static_argnums=1)(x, "bfloat16"), want)
    small = x * jnp.float32(2) ** -jnp.arange(1000.0) ** 0.5  # to below the least that float16 has
    want = np.asarray(small).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(round_to, static_argnums=1)(small, "float16"), want)
    assert 0.1 < np.mean((want != 0) & (np.abs(want) < 2.0**-14)) < 0.9 and (want == 0).any(
        ), "with numbers that are not normal"


# --- recipes


def test_runs_cover_all_layers_and_follow_first_last_and_pattern():
    runs = fp8_runs(SHAPES, 6, first_bf16=1, last_bf16=2, exclude=r"layers\.2\.mlp\.down_proj|o_proj")
    assert [(r.start, r.stop) for r in runs] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 6)]
    assert [r.fp8 for r in runs] == [frozenset(), ALL - {"o_proj"}, ALL - {"o_proj", "down_proj"},
                                     ALL - {"o_proj"}, frozenset()]
    assert fp8_runs(SHAPES, 6) == (LayerRun(0, 6, ALL),)
    assert fp8_runs(SHAPES, 2, first_bf16=5) == (LayerRun(0, 2, frozenset()),)


def test_a_pattern_is_searched_in_the_whole_module_name():
    (run,) = fp8_runs(SHAPES, 2, exclude="self_attn")
    assert run.fp8 == {"gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize(
    "exclude, message",
    [
        ("q_proj", "k_proj, v_proj of layer 0 without q_proj"),
        (r"layers\.1\.mlp\.up_proj", "gate_proj of layer 1 without up_proj"),  # one layer alone
        ("(", "precision.exclude: '\\('.*not a regular expression"),
    ],
)
def test_half_a_fused_product_and_a_broken_pattern_are_refused(exclude, message):
    with pytest.raises(ConfigError, match=message):
        fp8_runs(SHAPES, 2, exclude=exclude)


def test_shapes_that_do_not_divide_are_refused_with_the_pattern_that_helps():
    odd = SHAPES | {"mlp.down_proj": (128, 200), "mlp.gate_proj": (200, 128), "mlp.up_proj": (200, 128)}
    with pytest.raises(ConfigError, match=r'precision.exclude = "(.*)"') as e:
        fp8_runs(odd, 2)
    pattern = e.value.next_step.split('"')[1]
    assert fp8_runs(odd, 2, exclude=pattern)[0].fp8 == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_of_the_known_models_only_smollm2_has_linears_that_must_be_excluded():
    """docs/precision.md says so, and that a quarter of its layer's weights is left."""
    odd = {}
    for name in KNOWN:
        model = known_shape(name)
        shapes = linear_shapes(model)
        try:
            fp8_runs(shapes, model.num_hidden_layers, sparse_layers=model.sparse_layers)
        except ConfigError as e:
            assert "they are not padded" in e.next_step
            pattern = e.next_step.split('"')[1]
            (run,) = fp8_runs(shapes, model.num_hidden_layers, exclude=pattern)
            sizes = {module.split(".")[-1]: n * k for module, (n, k) in shapes.items()}
            odd[name] = (run.fp8, sum(sizes[x] for x in run.fp8) / sum(sizes.values()))
    assert odd.keys() == {"SmolLM2-135M", "SmolLM2-360M"}
    assert odd["SmolLM2-135M"] == ({"down_proj"}, 0.25)


def test_an_unknown_recipe_names_the_nearest_or_all():
    with pytest.raises(ConfigError, match='did you mean "fp8_unified"'):
        get_recipe("fp8_unifed")
    with pytest.raises(ConfigError, match=r'"nvfp4" is no recipe \(known: bf16, fp8_rollout,'):
        get_recipe("nvfp4")
    with pytest.raises(ConfigError,
                       match=r'"fp8" is no recipe \(here it is precision.recipe = "fp8_unified"'):
        get_recipe("fp8")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("weights", [FP8_WEIGHT, "bfloat16"])
def test_the_learner_mirrors_what_the_engine_reports_or_refuses(name, weights):
    recipe, runs = RECIPES[name], (LayerRun(0, 2, ALL),)
    for activations in (FP8_ACTIVATION, "bfloat16"):
        for kv in (FP8_KV, "bfloat16"):
            formats = EngineFormats(weights, activations, kv, "bfloat16",
                                    attention=FP8_KV if kv == FP8_KV else None)
            if (weights == FP8_WEIGHT) != recipe.engine_fp8:
                with pytest.raises(ConfigError, match=f'"{name}" needs .* engine weights'):
                    resolve(recipe, runs, formats, "float32", "bfloat16")
                continue
            p = resolve(recipe, runs, formats, "float32", "bfloat16")
            assert p.any_fp8 == recipe.forward_fp8 and p.runs[-1].stop == 2
            assert p.kv.fp8 == p.kv.attention_fp8 == (recipe.forward_fp8 and kv == FP8_KV)
            assert (p.gradients == "e4m3") == recipe.backward_fp8
            assert p.activations_fp8 == (activations == FP8_ACTIVATION)
            assert (p.compute_dtype, p.weight_dtype) == ("float32", "bfloat16")


@pytest.mark.parametrize("name", ["bf16", "fp8_unified"])
def test_what_an_engine_does_not_round_is_mirrored_under_every_recipe(name):
    weights = FP8_WEIGHT if RECIPES[name].engine_fp8 else "bfloat16"
    said = dict(unrounded_sums=True, probabilities="float32", amax_floor=2.0**-9)
    formats = EngineFormats(weights, FP8_ACTIVATION, "bfloat16", "bfloat16", **said)
    p = resolve(RECIPES[name], (LayerRun(0, 2, ALL),), formats, "bfloat16", "bfloat16")
    mirrored = dataclasses.asdict(p.kv) | dataclasses.asdict(p.rounding)
    assert {key: mirrored[key] for key in said} == said


@pytest.mark.parametrize(("gradients", "kernels"),
                         [("e4m3", 6), pytest.param("e5m2", 6, marks=pytest.mark.slow), ("high", 2)])
def test_on_hopper_all_of_an_fp8_product_is_kernels(gradients, kernels):
    """Lowered for CUDA: quantise, multiply; quantise dy both ways, dgrad, quantise x along the tokens, wgrad.
    Nothing between them makes a weight of its codes, unless the backward is asked to compute in high
    precision."""
    precision = Precision.uniform(1, "bfloat16", products="pallas", gradients=gradients)
    x, dy = (jax.ShapeDtypeStruct((2, 512, k), jnp.bfloat16) for k in (384, 640))
    weight = jax.eval_shape(QuantizedWeight.of, jax.ShapeDtypeStruct((640, 384), jnp.bfloat16))
    grad_slot = jax.ShapeDtypeStruct((640, 384), jnp.bfloat16)

    def run(x, weight, grad_slot, dy):
        y, pull = jax.vjp(lambda x, h: linear(x, WeightWithGradSlot(weight, h), precision, fp8=True), x,
                          grad_slot)
        return y, pull(dy)

    text = jax.jit(run).trace(x, weight, grad_slot, dy).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == kernels
    assert ("640x384xf32" in text) == (gradients == "high")


@pytest.mark.parametrize("field", ["products", "attention", "gradients", "saved_activations", "wgrad_inputs"])
def test_a_format_that_is_not_known_is_an_error(field):
    with pytest.raises(ValueError, match="'palas' is not a valid"):
        Precision.uniform(2, **{field: "palas"})


def test_a_string_is_as_good_as_the_format_that_it_names():
    """As a static argument of a jitted step, too."""
    by_name = Precision.uniform(2, products="pallas", gradients="e5m2", wgrad_inputs="128x128")
    by_member = Precision.uniform(2, products=Products.PALLAS, gradients=Gradients.E5M2,
                                  wgrad_inputs=WgradBlocks.SQUARES)
    assert by_name == by_member and hash(by_name) == hash(by_member)
    assert isinstance(by_name.products, Products)
