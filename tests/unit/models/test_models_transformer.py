"""The forward pass: equal to transformers, to itself under packing and padding, and to the cached path."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import load_params
from jaxfp8rl.models.module import Transformer, init_params
from jaxfp8rl.models.transformer import SAVED, forward, forward_cached, head_weight, init_cache, split_layers
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.precision.records import KvFormat, Precision
from jaxfp8rl.precision.weights import QuantizedWeight

pytestmark = pytest.mark.usefixtures("quick_compile")
LINEARS = frozenset(["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
SMALL = ModelConfig("Qwen3ForCausalLM", 97, 128, 256, 3, 4, 2, 32, 64)
FLOAT32 = Precision.uniform(3)
MIXED_RUNS = (LayerRun(0, 1, frozenset()), LayerRun(1, 3, LINEARS))
jit_forward = jax.jit(forward, static_argnums=(1, 5, 6))
jit_cached = jax.jit(forward_cached, static_argnums=(1, 5))


@functools.cache
def small_params():
    """Larger matrices than the initialisation's and norms off 1: no layer is nearly the identity, no
    attention uniform."""
    rng = np.random.default_rng(0)

    def leaf(path, like):
        noise = rng.standard_normal(like.shape, np.float32)
        return 1 + 0.1 * noise if "norm" in path[-2].key else 0.06 * noise

    return jax.tree_util.tree_map_with_path(leaf,
                                            jax.eval_shape(lambda: init_params(SMALL, jax.random.key(0))))


def row(T: int, B: int = 1):
    tokens = np.random.default_rng(2).integers(0, SMALL.vocab_size, (B, T))
    return tokens, np.broadcast_to(np.arange(T), (B, T)), np.ones((B, T), np.int32)


# --- against transformers
# ---------------------------------------------------------------------------------------------

TINY = dict(  # noqa: C408
    vocab_size=101, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512, initializer_range=0.2,
)
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}
MODELS = {
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
}


def random_hf_model(kind: str, keywords: dict):
    """A transformers model in float32 whose norms are not 1."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**TINY | keywords)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("case", MODELS)
def test_logits_equal_those_of_transformers(case, tmp_path):
    model = random_hf_model(*MODELS[case])
    import torch

    model.save_pretrained(tmp_path)
    cfg, params = load_params(tmp_path)
    # 200 positions: far past llama3's original 32
    tokens = np.random.default_rng(0).integers(0, 101, (2, 200))
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits.numpy()
    positions = np.broadcast_to(np.arange(200), tokens.shape)
    hidden = jit_forward(params, cfg, tokens, positions, np.ones_like(tokens), Precision.uniform(3), "none")
    logits = jnp.einsum("btd,vd->btv", hidden, head_weight(params, cfg), precision="highest")
    assert np.std(want) > 0.1
    np.testing.assert_allclose(logits, want, atol=1e-4)


# --- packing and padding
# ----------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, 23), max_size=3))
def test_packed_equals_separate(cuts):
    edges = [0, *sorted(cuts), 24]
    lengths = np.diff(edges)
    tokens, _, _ = row(24)
    positions = np.concatenate([np.arange(n) for n in lengths])[None]
    segments = np.repeat(np.arange(len(lengths)), lengths)[None] + 1
    packed = jit_forward(small_params(), SMALL, tokens, positions, segments, FLOAT32, "none")[0]

    alone = np.zeros((4, 24), np.int32)  # each segment in a row of its own, padded on the right
    for i, (a, b) in enumerate(itertools.pairwise(edges)):
        alone[i, : b - a] = tokens[0, a:b]
    real = np.arange(24)[None] < np.pad(lengths, (0, 4 - len(lengths)))[:, None]
    separate = jit_forward(
        small_params(), SMALL, alone, np.broadcast_to(np.arange(24), (4, 24)), real.astype(np.int32), FLOAT32,
        "none"
    )
    np.testing.assert_allclose(packed, separate[real], atol=2e-5)


def test_padding_is_finite_and_without_effect():
    tokens, positions, segments = row(16, B=2)
    segments[0, 11:], segments[1] = 0, 0
    one = jit_forward(small_params(), SMALL, tokens, positions, segments, FLOAT32, "none")
    tokens[0, 11:] = 5
    other = jit_forward(small_params(), SMALL, tokens, positions * segments, segments, FLOAT32, "none")
    assert np.isfinite(one).all() and np.isfinite(other).all()
    np.testing.assert_array_equal(one[0, :11], other[0, :11])
    assert not np.allclose(one[0, 11:], other[0, 11:])


# --- the cached path
# --------------------------------------------------------------------------------------------------

PRECISIONS = {
    "float32": FLOAT32,
    "bfloat16": Precision.uniform(3, "bfloat16"),
    "fp8-kv": Precision.uniform(3, kv=KvFormat(fp8=True)),
    "fp8-kv-attention": Precision.uniform(3, kv=KvFormat(fp8=True, attention_fp8=True)),
    "w8a16": Precision(MIXED_RUNS, activations_fp8=False, compute_dtype="float32"),
    "bfloat16-w8a8-fp8-kv": Precision(MIXED_RUNS, kv=KvFormat(fp8=True)),
}


def engine_params(params, precision):
    """The tree that an engine holds: one stack a run, FP8 linears as codes and scales."""

    def quantised(run, stack):
        def leaf(path, weight):
            return QuantizedWeight.of(weight) if path[-2].key in run.fp8 else weight

        return jax.tree_util.tree_map_with_path(leaf, stack)

    stacks = split_layers(params, precision)["layers"]
    return {**params, "layers": tuple(quantised(run, stack) for run, stack in zip(precision.runs, stacks))}


def generate_cached(params, tokens, positions, prompt_lengths, precision):
    """Prefill right-padded prompts, then feed the remaining tokens one by one: hidden states in place of each
    token."""
    B, T = tokens.shape
    rows, bucket = np.arange(B), int(max(prompt_lengths))
    inside = np.arange(bucket)[None] < np.array(prompt_lengths)[:, None]
    cache = init_cache(SMALL, B, T, precision)
    prompt = np.where(inside, tokens[:, :bucket], 7)  # the padding is garbage
    hidden, cache = jit_cached(params, SMALL, prompt, positions[:, :bucket], cache, precision)
    out = np.zeros((B, T, SMALL.hidden_size), np.float32)
    out[:, :bucket][inside] = np.asarray(hidden, np.float32)[inside]
    at = np.array(prompt_lengths)
    while (at < T).any():
        here = np.minimum(at, T - 1)  # a finished row repeats its last token
        hidden, cache = jit_cached(params, SMALL, tokens[rows, here][:, None], here[:, None], cache,
                                   precision)
        out[rows, here] = np.asarray(hidden[:, 0], np.float32)
        at = at + 1
    return out


@pytest.mark.parametrize("name", PRECISIONS)
def test_cached_equals_uncached(name):
    """Within 1e-5. Where values are rounded to FP8 or BF16, one near a tie may round the other way at a few
    positions."""
    precision = PRECISIONS[name]
    tokens, positions, segments = row(20, B=3)
    params = small_params()
    if name.startswith("bfloat16"):
        params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    want = np.asarray(jit_forward(params, SMALL, tokens, positions, segments, precision, "none"), np.float32)
    engine = engine_params(params, precision) if precision.any_fp8 else params
    got = generate_cached(engine, tokens, positions, [3, 12, 8], precision)
    error = np.abs(got - want).max(-1)
    if name == "float32":
        assert error.max() <= 1e-5
    else:
        assert np.median(error) <= 1e-5 and error.max() <= 0.1, error
    for rounding in [r for r in ("fp8", "attention_fp8") if getattr(precision.kv, r)]:
        # the bound can tell: every position moves
        unrounded = dataclasses.replace(precision, kv=dataclasses.replace(precision.kv, **{rounding: False}))
        other = np.asarray(jit_forward(params, SMALL, tokens, positions, segments, unrounded, "none"),
                           np.float32)
        assert np.median(np.abs(other - want).max(-1)) > 1e-3


def test_writes_past_the_end_of_the_cache_are_dropped():
    tokens = np.array([[1], [2], [3]])
    empty = init_cache(SMALL, 3, 20, FLOAT32)
    _, cache = jit_cached(small_params(), SMALL, tokens, np.array([[0], [1], [19]]), empty, FLOAT32)
    hidden, after = jit_cached(small_params(), SMALL, tokens, np.array([[20], [21], [99]]), cache, FLOAT32)
    chex.assert_trees_all_equal(after, cache)
    last = cache.k.reshape(-1, 3, 20, *cache.k.shape[3:])[:, 2, 19]
    assert np.isfinite(hidden).all() and float(jnp.abs(last).min()) > 0


# --- structure
# --------------------------------------------------------------------------------------------------------


def test_runs_and_stacks_do_not_change_the_numbers():
    inputs = row(24)
    in_two = Precision((LayerRun(0, 2, frozenset()), LayerRun(2, 3, frozenset())), compute_dtype="float32")
    whole = jit_forward(small_params(), SMALL, *inputs, FLOAT32, "none")
    np.testing.assert_allclose(jit_forward(small_params(), SMALL, *inputs, in_two, "none"), whole, atol=1e-6)
    split = split_layers(small_params(), in_two)
    np.testing.assert_allclose(jit_forward(split, SMALL, *inputs, in_two, "none"), whole, atol=1e-6)


def test_precision_must_cover_the_model():
    with pytest.raises(ValueError, match="covers 2 layers, the model has 3"):
        forward(small_params(), SMALL, *row(4), Precision.uniform(2))


def test_gradient_is_the_slope_whatever_is_computed_again():
    inputs, rng = row(24), np.random.default_rng(3)
    w = rng.standard_normal((1, 24, SMALL.hidden_size), np.float32)
    direction = jax.tree.map(lambda a: rng.standard_normal(a.shape, np.float32) * a.std(), small_params())

    def grads(remat):
        return jax.jit(jax.grad(lambda p: (forward(p, SMALL, *inputs, FLOAT32, remat) * w).mean()))(
            small_params())

    def loss(step):
        params = jax.tree.map(lambda p, u: p + np.float32(step) * u, small_params(), direction)
        return np.mean(np.asarray(jit_forward(params, SMALL, *inputs, FLOAT32, "none"), np.float64) * w)

    plain, h = grads("none"), 1e-3
    slope = sum(np.vdot(g, u) for g, u in zip(jax.tree.leaves(plain), jax.tree.leaves(direction)))
    assert slope == pytest.approx((loss(h) - loss(-h)) / (2 * h), rel=1e-2)
    for remat in SAVED:
        chex.assert_trees_all_close(plain, grads(remat), rtol=1e-4, atol=1e-7)
    per_layer = jax.tree.map(lambda g: jnp.abs(g).max(tuple(range(1, g.ndim))), plain["layers"])
    assert all(float(g.min()) > 0 for g in jax.tree.leaves(per_layer))


def test_module_owns_the_tree():
    model, inputs = Transformer(SMALL, nnx.Rngs(0)), row(24)
    chex.assert_trees_all_equal_shapes(model.params(), small_params())
    want = jit_forward(model.params(), SMALL, *inputs, FLOAT32, "none")
    np.testing.assert_allclose(model(*inputs, FLOAT32), want, atol=1e-5)


def test_initialisation():
    params = init_params(SMALL, jax.random.key(0), jnp.bfloat16)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert float(jnp.std(params["layers"]["mlp"]["up_proj"]["weight"])) == pytest.approx(0.02, rel=0.02)
    assert float(jnp.std(params["layers"]["mlp"]["down_proj"]["weight"])) == pytest.approx(
        0.02 / 6**0.5, rel=0.02)
    q = params["layers"]["self_attn"]["q_proj"]["weight"]
    assert not np.array_equal(q[0], q[1])
