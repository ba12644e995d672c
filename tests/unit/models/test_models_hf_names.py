"""The table of names: complete, unambiguous, and in the order of a real checkpoint."""

from __future__ import annotations

import dataclasses

import chex
import jax
import numpy as np
import pytest

from jaxfp8rl.models.config import Experts, ModelConfig
from jaxfp8rl.models.hf_names import empty_params, get_param, linear_shapes, param_table, set_param
from jaxfp8rl.models.module import init_params
from jaxfp8rl.precision.weights import QuantizedWeight
from jaxfp8rl.roles import ROLES, role_of

QWEN3 = ModelConfig("Qwen3ForCausalLM", 33, 16, 24, 2, 4, 2, 8, 64)
CONFIGS = {
    "qwen3": QWEN3,
    "qwen3-tied": dataclasses.replace(QWEN3, tie_word_embeddings=True),
    "llama": dataclasses.replace(QWEN3, architecture="LlamaForCausalLM"),
}
# a dense layer, then one of experts
SPARSE = dataclasses.replace(QWEN3, architecture="Qwen3MoeForCausalLM",
                             experts=Experts(6, 2, 40, mlp_only_layers=(0,)))


def random_params(cfg):
    """The tree of the real initialiser, filled with noise."""
    rng = np.random.default_rng(0)
    like = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    return jax.tree.map(lambda a: rng.standard_normal(a.shape, np.float32), like)


@pytest.mark.parametrize("name", CONFIGS)
def test_table_names_what_transformers_names(name):
    transformers = pytest.importorskip("transformers")
    cfg = CONFIGS[name]
    config = transformers.AutoConfig.for_model(**cfg.to_hf())
    theirs = {k: tuple(v.shape)
              for k, v in transformers.AutoModelForCausalLM.from_config(config).state_dict().items()}
    if cfg.tie_word_embeddings:
        theirs.pop("lm_head.weight")
    table = param_table(cfg)
    assert [(e.hf_name, e.shape) for e in table] == list(theirs.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_table_covers_the_parameter_tree(name):
    cfg = CONFIGS[name]
    params = random_params(cfg)
    copy = empty_params(cfg, np.float32)
    for leaf in jax.tree.leaves(copy):
        leaf[:] = np.nan
    for entry in param_table(cfg):
        tensor = get_param(params, entry)
        assert tensor.shape == entry.shape
        set_param(copy, entry, tensor)
    chex.assert_trees_all_equal(copy, params)


def test_roles_and_linear_shapes():
    roles = {e.hf_name: e.role.kind for e in param_table(QWEN3)}
    assert roles["model.embed_tokens.weight"] == "embedding" and roles["lm_head.weight"] == "head"
    assert roles["model.layers.1.self_attn.q_norm.weight"] == roles["model.norm.weight"] == "norm"
    linears = {e.hf_name: e.shape for e in param_table(QWEN3) if e.role.kind == "linear"}
    assert linears == {f"model.layers.{i}.{m}.weight": s for i in range(2)
                       for m, s in linear_shapes(QWEN3).items()}


@pytest.mark.parametrize("cfg", [*CONFIGS.values(), SPARSE], ids=[*CONFIGS, "sparse"])
def test_the_leaves_of_a_tree_have_the_roles_of_the_table(cfg):
    """Each by name: none is taken for a linear because nobody knows it."""
    table = {e.path: e.role for e in param_table(cfg)}
    like = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    for path, _ in jax.tree_util.tree_leaves_with_path(like):
        names = tuple(key.key for key in path)
        role = role_of(path)
        assert names[-2] in ROLES and role == table.pop(names)
        assert (role.kind == "norm") == ("norm" in names[-2]) == (not role.decays) == (not role.fsdp)
        assert (role.tensor == "neither") == (role.kind in ("norm", "router"))
    assert not table


def test_get_param_keeps_codes_and_scales_together():
    params = random_params(QWEN3)
    up = params["layers"]["mlp"]["up_proj"]
    up["weight"] = QuantizedWeight.of(up["weight"])
    entry = next(e for e in param_table(QWEN3) if e.hf_name == "model.layers.1.mlp.up_proj.weight")
    chex.assert_trees_all_equal(get_param(params, entry),
                                QuantizedWeight(up["weight"].codes[1], up["weight"].scale[1]))
