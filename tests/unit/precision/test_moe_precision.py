"""Experts under every recipe: each expert's rows are an instance of `linear`, to the bit, forwards and
backwards."""

from __future__ import annotations

import dataclasses
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridges.proof import manifest
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.errors import ConfigError, ModelError
from jaxfp8rl.models.config import Experts, ModelConfig
from jaxfp8rl.models.hf_names import get_param, linear_shapes, param_table
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.moe import moe_block
from jaxfp8rl.policy.policy import policy_of
from jaxfp8rl.precision.experts import combine_tokens, dispatch, grouped_linear
from jaxfp8rl.precision.layer_runs import fp8_runs, plain_runs
from jaxfp8rl.precision.linear import linear
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.precision.weights import QuantizedWeight, WeightWithGradSlot
from jaxfp8rl.probes.finite import check_finite, find_nonfinite
from jaxfp8rl.publish.wire import LearnerWeights, assemble, is_fp8

pytestmark = pytest.mark.usefixtures("quick_compile")

T, K, N, E = 40, 256, 128, 4
FORMATS = {
    "W8A8": Precision(()),
    "W8A8, E5M2, saved FP8": Precision((), gradients="e5m2", saved_activations="fp8"),
    "W8A8, E4M3": Precision((), gradients="e4m3"),
    "W8A16": Precision((), activations_fp8=False),
    "float32": Precision((), compute_dtype="float32"),
}
QUICK = "W8A8, E4M3"


def arrays(dtype):
    rng = np.random.default_rng(0)
    spread = lambda *shape: rng.standard_normal(shape) * np.exp(rng.standard_normal(shape))
    x, w, dy = spread(T, K), 0.1 * spread(E, N, K), spread(T, 2, N)
    ids = np.sort(np.argsort(rng.random((T, E - 1)), -1)[:, :2], -1)  # the last expert has no tokens
    return *(jnp.asarray(a, jnp.float32).astype(dtype) for a in (x, w, dy)), jnp.asarray(ids, jnp.int32)


@pytest.mark.parametrize("name",
                         [n if n == QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FORMATS])
def test_each_expert_is_an_instance_of_linear(name):
    precision, fp8 = FORMATS[name], name != "float32"
    x, w, dy, ids = arrays(precision.compute_dtype)
    quantized = QuantizedWeight.of(w) if fp8 else w

    def weight(w, grad_slot):
        if grad_slot is None:  # it does not learn
            return w
        return WeightWithGradSlot(w, grad_slot) if fp8 else grad_slot

    @jax.jit
    def grouped(x, quantized, grad_slot):
        d = dispatch(ids, E)
        return combine_tokens(grouped_linear(x, weight(quantized, grad_slot), d, precision, fp8,
                                             of_tokens=True), d)

    grad_slot = jnp.zeros_like(w) if fp8 else w
    y, pull = jax.vjp(lambda x, h: grouped(x, quantized, h), x, grad_slot)
    dx, dw = pull(dy)
    frozen, pull = jax.vjp(lambda x: grouped(x, quantized, None), x)
    chex.assert_trees_all_equal((frozen, pull(dy)), (y, (dx,)))
    each = jax.jit(lambda x, q, h: linear(x, weight(q, h), precision, fp8))
    want_dx = np.zeros((T, 2, K), np.float32)
    for e in range(E):
        token, place = (np.asarray(a) for a in np.nonzero(np.asarray(ids) == e))
        # padded as rows of an expert are: wgrad's blocks run along them
        rows = np.zeros((max(128, len(token)), K), np.float32)
        rows[: len(token)], d_rows = x[token], np.zeros((len(rows), N), np.float32)
        d_rows[: len(token)] = dy[token, place]
        rows, d_rows = (jnp.asarray(a, precision.compute_dtype) for a in (rows, d_rows))
        of_expert = jax.tree.map(operator.itemgetter(e), quantized)
        want, pull = jax.vjp(lambda x, h, w=of_expert: each(x, w, h), rows, grad_slot[e])
        d_x, d_w = pull(d_rows)
        # sums of another order
        exact = {"rtol": 2e-2 if precision.gradients != "high" else 1e-5, "atol": 1e-5}
        chex.assert_trees_all_close(y[token, place], want[: len(token)], rtol=1e-6, atol=1e-6)
        chex.assert_trees_all_close(dw[e].astype(jnp.float32), d_w.astype(jnp.float32), **exact)
        want_dx[token, place] = d_x[: len(token)].astype(np.float32)
    scale = np.abs(want_dx).max()
    np.testing.assert_allclose(dx.astype(np.float32), want_dx.sum(1),
                               atol=1e-2 * scale if fp8 else 1e-5 * scale)


def test_gates_and_router_stay_in_float32():
    """Of bfloat16 layers the only float32 products are the router's."""
    experts, precision = Experts(E, 2, 128, True), Precision((), compute_dtype="bfloat16")
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    w = {"gate": {"weight": like(E, K)}, "experts": {n: {"weight": like(E, *s)} for n, s in
         {"gate_proj": (128, K), "up_proj": (128, K), "down_proj": (K, 128)}.items()}}
    jaxpr = str(jax.make_jaxpr(lambda x, w: moe_block(x, w, experts, precision, False))(like(1, T, K), w))
    routers = [line for line in jaxpr.splitlines() if "dot_general" in line and f"f32[{T},{E}]" in line]
    assert len(routers) == 1


@pytest.mark.parametrize("width", [192, 256])
def test_where_products_are_the_kernels_those_in_high_precision_are_traced_of_any_width(width):
    """On a CPU, where JAX's kernels cannot be, and of widths that they do not take."""
    like, precision = lambda *shape: jax.ShapeDtypeStruct(shape,
                                                          jnp.bfloat16), Precision((), products="pallas")
    d = jax.eval_shape(lambda ids: dispatch(ids, E), jax.ShapeDtypeStruct((T, 2), jnp.int32))
    loss = lambda x, w, d: jnp.sum(grouped_linear(x, w, d, precision, False, of_tokens=True),
                                   dtype=jnp.float32)
    dx, dw = jax.eval_shape(jax.grad(loss, (0, 1)), like(T, K), like(E, width, K), d)
    assert (dx.shape, dw.shape, dw.dtype) == ((T, K), (E, width, K), jnp.bfloat16)


HF = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 48, "hidden_size": 128,
    "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 64, "num_experts": 3,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True, "mlp_only_layers": [1], "tie_word_embeddings": False,
}
MODEL = ModelConfig.from_hf(HF)
ALL = frozenset(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


def test_runs_part_layers_of_other_formats_and_of_other_kinds():
    shapes = linear_shapes(MODEL)
    assert [(r.start, r.stop, r.sparse)
            for r in plain_runs(MODEL.sparse_layers)] == [(0, 1, True), (1, 2, False), (2, 4, True)]
    runs = fp8_runs(shapes, 4, last_bf16=1, exclude=r"layers\.2\.mlp\.experts",
                    sparse_layers=MODEL.sparse_layers)
    assert [(r.start, r.fp8, r.sparse) for r in runs] == [
        (0, ALL, True), (1, ALL, False), (2, ALL - {"gate_proj", "up_proj", "down_proj"}, True),
        (3, frozenset(), True)
    ]
    with pytest.raises(ConfigError, match=r"layer 0 without gate_proj, up_proj"):
        fp8_runs(shapes, 4, exclude=r"experts\.(gate|up)_proj", sparse_layers=MODEL.sparse_layers)
    narrow = dataclasses.replace(MODEL, experts=dataclasses.replace(MODEL.experts, moe_intermediate_size=96))
    with pytest.raises(ConfigError, match=r"down_proj \[128, 96\]"):
        fp8_runs(linear_shapes(narrow), 4, sparse_layers=MODEL.sparse_layers)


@pytest.fixture(scope="module")
def sent():
    runs = fp8_runs(linear_shapes(MODEL), 4, last_bf16=1, sparse_layers=MODEL.sparse_layers)
    params = init_params(MODEL, jax.random.key(0))
    return runs, params, policy_of(params, Precision(runs, compute_dtype="bfloat16"))


def test_every_expert_crosses_under_its_own_name_with_its_own_scales(sent):
    runs, params, policy = sent
    source = LearnerWeights(MODEL, policy, runs, "bfloat16")
    wire = {}
    for meta, (name, buffer) in zip(source.manifest(), source, strict=True):
        manifest.check_tensor(meta, name, str(buffer.dtype), buffer.shape)
        wire[name] = jnp.from_dlpack(buffer)
    scaled = {name.removesuffix(".weight_scale_inv") for name in wire if name.endswith("_scale_inv")}
    assert not scaled & {"model.layers.0.mlp.gate", "model.layers.3.mlp.experts.0.up_proj"}
    for e in param_table(MODEL):
        if is_fp8(e, runs):
            want = QuantizedWeight.of(get_param(params, e).astype(jnp.bfloat16))
            np.testing.assert_array_equal(wire[e.hf_name].view(jnp.uint8), want.codes.view(jnp.uint8))
            np.testing.assert_array_equal(wire[e.hf_name + "_scale_inv"], want.scale)
        else:
            np.testing.assert_array_equal(wire[e.hf_name], get_param(params, e).astype(jnp.bfloat16))
    assembled = assemble(MODEL, runs, wire)
    chex.assert_trees_all_equal(assembled["layers"], policy["layers"])


@pytest.mark.parametrize("held", ["policy", "masters"])
def test_what_is_quantised_on_its_way_is_the_same(sent, held):
    """Experts of a bfloat16 policy, as of recipe fp8_rollout, and of one stack of layers of both kinds, as
    `export` has it."""
    runs, params, policy = sent
    plain = policy_of(params, Precision(plain_runs(MODEL.sparse_layers), compute_dtype="bfloat16"))
    given = plain if held == "policy" else {**params, "layers": (params["layers"],)}
    want = {name: np.asarray(x).tobytes() for name, x in LearnerWeights(MODEL, policy, runs, "bfloat16")}
    source = LearnerWeights(MODEL, given, runs, "bfloat16")
    assert {name: np.asarray(x).tobytes() for name, x in source} == want
    shapes = {meta.name: meta.shape for meta in source.manifest()}
    for rows in (rows for part in source.stacks(1) for rows in part):  # parts of a row each
        for i, name in enumerate(rows.names):
            stack = np.asarray(rows.stack)
            row = stack if rows.first is None else stack.reshape(-1, *shapes[name])[rows.first + i]
            assert row.tobytes() == want[name], name


@pytest.mark.slow
def test_stacks_hold_what_the_tensors_do(sent):
    """Rows are counted over layers and experts together; of what is made a part is whole layers."""
    runs, params, policy = sent
    for held in (policy, policy_of(params, Precision(runs, compute_dtype="float32"))):
        source = LearnerWeights(MODEL, held, runs, "bfloat16")
        want = dict(source)
        seen = []
        for part in source.stacks(100_000):
            for rows in part:
                seen += rows.names
                for i, name in enumerate(rows.names):
                    shape = want[name].shape
                    stack = np.asarray(rows.stack)
                    row = stack if rows.first is None else stack.reshape(-1, *shape)[rows.first + i]
                    np.testing.assert_array_equal(row, np.asarray(want[name]))
        assert sorted(seen) == sorted(m.name for m in source.manifest())


@pytest.mark.slow
def test_a_mixture_that_is_not_finite_is_named():
    params = init_params(MODEL, jax.random.key(0))
    experts = params["layers"]["moe"]["experts"]
    weight = np.asarray(experts["down_proj"]["weight"]).copy()
    weight[1, 2, 5, 7] = np.nan
    broken = experts | {"down_proj": {"weight": jnp.asarray(weight)}}
    params["layers"]["moe"]["experts"] = broken
    with pytest.raises(ModelError,
                       match=r"model\.layers\.2\.mlp\.experts\.2\.down_proj\.weight \(1 of 16384 elements\)"):
        check_finite(params, MODEL)
    experts = experts | {"down_proj": {"weight": experts["down_proj"]["weight"].at[1].multiply(1e38)}}
    params["layers"]["moe"]["experts"] = experts | {"up_proj": {"weight": experts["up_proj"]["weight"] * 1e6}}
    sample = Sample(np.arange(5), np.arange(6), np.full(6, -1, np.float32), 1.0)
    precision = Precision(plain_runs(MODEL.sparse_layers), compute_dtype="float32", weight_dtype="float32")
    where = find_nonfinite(params, pack([sample], 16, 1, 1), MODEL, precision)
    assert where.startswith("micro-batch 0, layer 2: the output of the mixture of experts is not finite at")
