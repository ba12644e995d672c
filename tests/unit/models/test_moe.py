"""Mixtures of experts: equal to transformers, to a reference that computes every expert, and to themselves
when cached."""

from __future__ import annotations

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from jax.sharding import AbstractMesh
from safetensors.numpy import load_file

from jaxfp8rl.distributed.mesh import AXES, ONE, MeshLayout
from jaxfp8rl.errors import ConfigError, ModelError
from jaxfp8rl.models import moe
from jaxfp8rl.models.config import Experts, ModelConfig
from jaxfp8rl.models.hf_names import empty_params, get_param, linear_shapes, param_table, set_param
from jaxfp8rl.models.loading import load_params, save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.transformer import (
    forward,
    forward_cached,
    forward_with_aux,
    head_weight,
    init_cache,
    split_layers,
)
from jaxfp8rl.policy.policy import as_params
from jaxfp8rl.precision.layer_runs import fp8_runs, plain_runs
from jaxfp8rl.precision.records import EngineRounding, Precision

pytestmark = pytest.mark.usefixtures("quick_compile")
HF = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 101, "hidden_size": 48,
    "intermediate_size": 80, "moe_intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "num_experts": 5,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True, "rope_theta": 10000.0,
}
MIXED = HF | {"mlp_only_layers": [1]}
UNNORMED = HF | {"norm_topk_prob": False, "decoder_sparse_step": 2, "num_experts_per_tok": 3}
CFG = ModelConfig.from_hf(MIXED)
jit_forward = jax.jit(forward, static_argnums=(1, 5, 6))


def plain(cfg: ModelConfig, dtype: str = "float32") -> Precision:
    return Precision(plain_runs(cfg.sparse_layers), compute_dtype=dtype)


def random_hf_model(hf: dict):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    keys = {k: v for k, v in hf.items() if k not in ("architectures", "model_type")}
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**keys)).to(torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if "norm" in name else 0.2 * torch.randn_like(p))
    return model


@pytest.mark.parametrize("hf", [MIXED, pytest.param(UNNORMED, marks=pytest.mark.slow)],
                         ids=["mixed", "not normalised"])
def test_logits_equal_those_of_transformers(hf, tmp_path):
    import torch

    model = random_hf_model(hf)
    model.save_pretrained(tmp_path / "theirs")
    cfg, params = load_params(tmp_path / "theirs")
    assert cfg.sparse_layers == ((True, False, True) if hf is MIXED else (False, True, False))
    tokens = np.random.default_rng(0).integers(0, 101, (2, 70))
    with torch.no_grad():
        want = model(torch.tensor(tokens)).logits.numpy()
    positions = np.broadcast_to(np.arange(70), tokens.shape)
    hidden = jit_forward(params, cfg, tokens, positions, np.ones_like(tokens), plain(cfg), "none")
    logits = jnp.einsum("btd,vd->btv", hidden, head_weight(params, cfg), precision="highest")
    assert np.std(want) > 0.1
    np.testing.assert_allclose(logits, want, atol=1e-4)


def raw(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def test_saved_loaded_there_and_saved_again_is_equal_bytes(tmp_path):
    transformers = pytest.importorskip("transformers")
    save_params(tmp_path / "ours", CFG, random_params(CFG), dtype="bfloat16", max_shard_bytes=20_000)
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(there).__name__ == "Qwen3MoeForCausalLM"
    there.save_pretrained(tmp_path / "theirs")
    ours, theirs = raw(tmp_path / "ours"), raw(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and ours[name].tobytes() == theirs[name].tobytes(), name
    assert load_params(tmp_path / "theirs")[0] == dataclasses.replace(CFG, dtype="bfloat16")


def test_every_tensor_has_its_own_place():
    params = empty_params(CFG, np.float32)
    for i, entry in enumerate(param_table(CFG)):
        set_param(params, entry, np.full(entry.shape, i, np.float32))
    split = split_layers(params, plain(CFG))
    assert [sorted({"mlp", "moe"} & stack.keys()) for stack in split["layers"]] == [["moe"], ["mlp"], ["moe"]]
    for i, entry in enumerate(param_table(CFG)):
        for tree in (params, split):
            np.testing.assert_array_equal(get_param(tree, entry), i)
    chex.assert_trees_all_equal_shapes(params, jax.eval_shape(lambda: init_params(CFG, jax.random.key(0))))
    chex.assert_trees_all_equal(as_params(split), params)


# --- one layer against a reference that computes every expert of every token
# ---------------------------------------------


def one_hot_mixture(x, w, experts: Experts):
    """x [T, D]: all experts of all tokens, weighted by gates that are 0 but for the chosen."""
    logits = jnp.einsum("td,ed->te", x, w["gate"]["weight"], precision="highest")
    probs = jax.nn.softmax(logits)
    chosen = jax.nn.one_hot(jax.lax.top_k(logits, experts.num_experts_per_tok)[1], experts.num_experts).sum(1)
    gates = probs * chosen / (jnp.sum(probs * chosen, 1, keepdims=True) if experts.norm_topk_prob else 1)
    of = {name: node["weight"] for name, node in w["experts"].items()}
    gate, up = (jnp.einsum("td,efd->tef", x, of[name], precision="highest")
                for name in ("gate_proj", "up_proj"))
    down = jnp.einsum("tef,edf->ted", jax.nn.silu(gate) * up, of["down_proj"], precision="highest")
    return jnp.einsum("te,ted->td", gates, down, precision="highest")


def layer_of(experts: Experts, D: int = 24, seed: int = 0):
    rng, F = np.random.default_rng(seed), experts.moe_intermediate_size
    shapes = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    random = lambda *shape: {"weight": jnp.asarray(0.3 * rng.standard_normal(shape, np.float32))}
    return {
        "gate": random(experts.num_experts, D),
        "experts": {name: random(experts.num_experts, *shape) for name, shape in shapes.items()},
    }


@pytest.mark.parametrize(
    "experts",
    [
        Experts(6, 2, 40, True),
        pytest.param(Experts(3, 3, 16, False), marks=pytest.mark.slow),
        pytest.param(Experts(1, 1, 16, True), marks=pytest.mark.slow),
    ],
    ids=["2 of 6", "all of 3, not normalised", "one"],
)
def test_gradients_equal_a_one_hot_reference(experts):
    rng, w = np.random.default_rng(1), layer_of(experts)
    x, dy = (jnp.asarray(rng.standard_normal((2, 75, 24), np.float32)) for _ in range(2))
    precision = Precision.uniform(1)

    def ours(x, w):
        return jnp.sum(dy * moe.moe_block(x, w, experts, precision, False)[0])

    def theirs(x, w):
        return jnp.sum(dy * one_hot_mixture(x.reshape(-1, 24), w, experts).reshape(x.shape))

    got, want = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, w) for f in (ours, theirs))
    chex.assert_trees_all_close(got[0], want[0], rtol=1e-5)
    scale = lambda tree: max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(tree))
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, scale(b)))


def test_experts_without_tokens_get_no_gradient_and_padding_gets_zeros():
    experts, rng = Experts(6, 2, 40, True), np.random.default_rng(1)
    w, x = layer_of(experts), jnp.asarray(rng.standard_normal((1, 9, 24), np.float32))
    live = jnp.arange(9)[None] < 5
    routes = jnp.full((1, 9, 2), jnp.asarray([4, 1], jnp.uint8))

    def f(x, w):
        y, routing = moe.moe_block(x, w, experts, Precision.uniform(1), False, live, routes)
        return jnp.sum(y), (y, routing)

    (dx, dw), (y, routing) = jax.jit(jax.grad(f, (0, 1), has_aux=True))(x, w)
    assert not y[0, 5:].any() and y[0, :5].all() and not dx[0, 5:].any()
    idle = jnp.asarray([0, 2, 3, 5])
    assert not any(leaf[idle].any() for leaf in jax.tree.leaves(dw["experts"]))
    assert all(leaf[jnp.asarray([1, 4])].any((1, 2)).all() for leaf in jax.tree.leaves(dw["experts"]))
    assert dw["gate"]["weight"].any()  # the router learns of the experts that were replayed
    want = jax.lax.top_k(jnp.einsum("btd,ed->bte", x, w["gate"]["weight"], precision="highest"), 2)[1]
    np.testing.assert_array_equal(routing.ids, jnp.sort(want, -1))  # and says what it would have chosen


WILD = Experts(4, 3, 16, True)
WILD_IDS = st.sampled_from([-(2**31), -5, -4, -1, 0, 1, 2, 3, 4, 5, 8, 2**31 - 2])


def by_numpy(x, w, ids, experts: Experts):
    """Token by token and expert by expert, of those that there are."""
    weight = {name: np.asarray(node["weight"], np.float64) for name, node in w["experts"].items()}
    logits, out = x @ np.asarray(w["gate"]["weight"], np.float64).T, np.zeros(x.shape)
    for t, chosen in enumerate(ids):
        real = [e for e in chosen if 0 <= e < experts.num_experts]
        over = real if experts.norm_topk_prob else range(experts.num_experts)
        for e in real:
            gate, up = (weight[name][e] @ x[t] for name in ("gate_proj", "up_proj"))
            share = np.exp(logits[t, e]) / sum(np.exp(logits[t, i]) for i in over)
            out[t] += share * (weight["down_proj"][e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@functools.partial(jax.jit, static_argnums=(3, 4))
def by_routes(x, w, ids, experts: Experts, tensor: int):
    """The mixture on `tensor` devices, each with its own experts: as `vmap` makes the axis of a mesh."""
    layout = MeshLayout(AbstractMesh((1, 1, tensor), AXES)) if tensor > 1 else ONE
    parts = jax.tree.map(lambda a: a.reshape(tensor, -1, *a.shape[1:]), w["experts"])

    def one(part):
        return moe.moe_block(x[None], w | {"experts": part}, experts, Precision.uniform(1), False, None,
                           ids[None], layout)[0][0]

    return jax.vmap(one, axis_name="tensor")(parts)


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("norm", [True, False])
@given(ids=arrays(np.int32, (9, 3), elements=WILD_IDS))
def test_a_number_of_no_expert_is_left_out_and_moves_no_other_token(norm, tensor, ids):
    """Negative or too large, on one device and on several, with its share of the gates."""
    experts, x = dataclasses.replace(WILD,
                                     norm_topk_prob=norm), np.random.default_rng(1).standard_normal((9, 24))
    w = layer_of(experts)
    got = by_routes(jnp.asarray(x, jnp.float32), w, jnp.asarray(ids), experts, tensor)
    np.testing.assert_allclose(got, np.broadcast_to(by_numpy(x, w, ids, experts), got.shape), atol=3e-5)


def test_no_number_of_an_expert_has_a_gradient_that_is_not_finite():
    ids = jnp.asarray([[-1, 0, 1], [-1, -1, 7], [2, 3, 4]])
    x, w = jnp.asarray(np.random.default_rng(1).standard_normal((3, 24)), jnp.float32), layer_of(WILD)
    grads = jax.grad(lambda x, w: by_routes(x, w, ids, WILD, 1).sum(), (0, 1))(x, w)
    chex.assert_tree_all_finite(grads)
    assert not grads[0][1].any() and grads[0][0].all()  # of the second token nothing is computed


def test_a_frozen_router_gets_no_gradient_and_its_input_does():
    experts, x = Experts(4, 2, 16,
                         True), jnp.asarray(np.random.default_rng(0).standard_normal((1, 7, 24), np.float32))
    w = layer_of(experts)
    f = lambda w, x, e: jnp.sum(moe.moe_block(x, w, e, Precision.uniform(1), False)[0] ** 2)
    gradient = jax.jit(jax.grad(f, (0, 1)), static_argnums=2)
    free, frozen = (gradient(w, x, dataclasses.replace(experts, frozen_router=still))
                    for still in (False, True))
    assert free[0]["gate"]["weight"].any() and not frozen[0]["gate"]["weight"].any()
    chex.assert_trees_all_close((free[0]["experts"], free[1]), (frozen[0]["experts"], frozen[1]), rtol=1e-6)


def test_router_logits_are_rounded_as_an_engines_are_and_their_gradient_is_not():
    experts, rng = Experts(64, 8, 16, True), np.random.default_rng(0)
    w, x = layer_of(experts), jnp.asarray(rng.standard_normal((1, 300, 24), np.float32))
    engines = Precision.uniform(1, rounding=EngineRounding(router_dtype="bfloat16"))
    chosen = {p.rounding.router_dtype: np.asarray(moe.moe_block(x, w, experts, p, False)[1].ids[0])
              for p in (engines, Precision.uniform(1))}
    logits = np.asarray(jnp.asarray(x[0] @ w["gate"]["weight"].T, jnp.bfloat16), np.float32)
    want = np.sort(np.argsort(-logits, axis=-1, kind="stable")[:, :8], -1)  # of equal ones the first
    # sums are of another order, and may round another way
    assert np.mean((chosen["bfloat16"] == want).all(-1)) > 0.99
    assert 0.01 < np.mean((chosen["bfloat16"] != chosen["float32"]).any(-1)) < 0.5
    slopes = [jax.grad(lambda g, d=d: jnp.sum(jnp.sin(moe._router_logits(x[0], g, experts, d))))(
        w["gate"]["weight"])
              for d in ("float32", "bfloat16")]
    np.testing.assert_allclose(slopes[1], slopes[0], atol=0.02 * float(jnp.abs(slopes[0]).max()))
    assert len(np.unique(np.asarray(slopes[1]))) > 0.9 * slopes[1].size, "not of bfloat16's few numbers"


def test_the_balance_is_one_where_all_experts_have_as_much_to_do():
    experts = Experts(4, 1, 16, True)
    x = 20 * jnp.eye(4)[None]  # token i is expert i's
    w = layer_of(experts, D=4) | {"gate": {"weight": jnp.eye(4)}}
    balance = jax.jit(lambda live: moe.moe_block(x, w, experts, Precision.uniform(1), False, live)[1].balance)
    even, one = balance(jnp.ones((1, 4), bool)), balance(jnp.arange(4)[None] == 2)
    np.testing.assert_allclose([even, one], [1, 4], rtol=1e-5)


# --- the model
# --------------------------------------------------------------------------------------------------------


@functools.cache
def random_params(cfg: ModelConfig):
    rng = np.random.default_rng(0)

    def leaf(path, like):
        noise = rng.standard_normal(like.shape, np.float32)
        return 1 + 0.1 * noise if "norm" in path[-2].key else 0.2 * noise

    return jax.tree_util.tree_map_with_path(leaf, empty_params(cfg, np.float32))


def test_packed_and_cached_equal_alone():
    rng, params, precision = np.random.default_rng(3), random_params(CFG), plain(CFG)
    tokens = rng.integers(0, 101, (1, 24))
    ids = np.repeat([1, 2, 0], [10, 11, 3])[None]
    positions = np.concatenate([np.arange(10), np.arange(11), np.arange(3)])[None]
    packed, _, routing = jax.jit(forward_with_aux,
                                 static_argnums=(1, 5))(params, CFG, tokens, positions, ids, precision)
    assert routing.ids.shape == (2, 1, 24, 2) and routing.ids.dtype == np.uint8
    step = jax.jit(forward_cached, static_argnums=(1, 5))
    second, where = tokens[:, 10:21], np.arange(11)[None]
    cache = init_cache(CFG, 1, 16, precision)
    hidden, cache = step(params, CFG, second[:, :8], where[:, :8], cache, precision)
    parts = [hidden]
    for t in range(8, 11):
        hidden, cache = step(params, CFG, second[:, t : t + 1], where[:, t : t + 1], cache, precision)
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), packed[:, 10:21], atol=2e-5)
    np.testing.assert_array_equal(cache.routes.reshape(2, 1, 16, 2)[:, :, :11], routing.ids[:, :, 10:21])


def test_runs_must_be_of_one_kind():
    with pytest.raises(ValueError, match="plain_runs"):
        forward(random_params(CFG), CFG, *(np.zeros((1, 4), int),) * 3, Precision.uniform(3))


# --- the config
# -------------------------------------------------------------------------------------------------------


def test_config_round_trip():
    raw = HF | {"mlp_only_layers": [0, 2], "decoder_sparse_step": 2, "router_aux_loss_coef": 0.001}
    cfg = ModelConfig.from_hf(raw)
    assert cfg.experts == Experts(5, 2, 32, True, 2, (0, 2)) and cfg.family.qk_norm
    assert ModelConfig.from_hf(cfg.to_hf()) == cfg
    assert cfg.to_hf()["router_aux_loss_coef"] == 0.001  # kept, though ours is in the run's own config
    # as transformers' own config may be
    without = ModelConfig.from_hf({k: v for k, v in HF.items() if k != "head_dim"})
    assert without.head_dim == HF["hidden_size"] // HF["num_attention_heads"]


def test_what_is_advised_for_widths_without_blocks_is_accepted():
    cfg = ModelConfig.from_hf(HF | {"hidden_size": 192, "moe_intermediate_size": 128, "head_dim": 32})
    runs = functools.partial(fp8_runs, linear_shapes(cfg), cfg.num_hidden_layers,
                             sparse_layers=cfg.sparse_layers)
    with pytest.raises(ConfigError, match="do not divide") as refused:
        runs()
    advice = re.search('exclude = "(.*)"', refused.value.next_step)[1]
    assert "down_proj" in advice and not any("gate_proj" in run.fp8 for run in runs(exclude=advice))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": None}, "num_experts must be a positive integer"),
        ({"num_experts": 0}, "num_experts must be a positive integer"),
        ({"num_local_experts": 4}, "num_experts = 5 and num_local_experts = 4"),
        ({"moe_intermediate_size": "32"}, "moe_intermediate_size must be"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok = 6 of num_experts = 5"),
        ({"mlp_only_layers": [3]}, "mlp_only_layers names layer 3, num_hidden_layers is 3"),
        ({"decoder_sparse_step": 4}, "leave no layer with experts"),
        ({"decoder_sparse_step": True}, "decoder_sparse_step must be"),
    ],
)
def test_impossible_configs_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_hf(HF | change)
