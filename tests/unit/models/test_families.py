"""Every family against transformers: logits, gradients, and folders in both directions."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfp8rl.cli.settings import find
from jaxfp8rl.errors import ModelError
from jaxfp8rl.losses import logprobs
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.families import FAMILIES
from jaxfp8rl.models.hf_names import get_param, param_table
from jaxfp8rl.models.loading import load_params, save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.rope import Rope
from jaxfp8rl.models.transformer import forward, forward_cached, head_weight, init_cache
from jaxfp8rl.precision.records import Precision

pytestmark = pytest.mark.usefixtures("quick_compile")
LAYERS, T, VOCAB = 4, 96, 101
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
GEMMA_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
              "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 8.0}}
GEMMA = {"head_dim": 32, "sliding_window": 7, "_sliding_window_pattern": 3, "query_pre_attn_scalar": 20,
         "final_logit_softcapping": 3.0, "rope_parameters": GEMMA_ROPE}
# name -> (the name in transformers, its keywords). T is above every window and original length.
MODELS = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-dynamic": ("Llama", {"rope_parameters": DYNAMIC}),
    "mistral": ("Mistral", {"sliding_window": 9}),
    "mistral-no-window": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma3": ("Gemma3", GEMMA),
}
CLASSES = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}


@functools.cache
def hf_model(case: str):
    """A random transformers model in float32 whose norms and biases are not as at first."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind, keywords = MODELS[case]
    config, model = CLASSES.get(kind, (f"{kind}Config", f"{kind}ForCausalLM"))
    config = getattr(transformers, config)(**SIZES | keywords, attn_implementation="eager")
    model = getattr(transformers, model)(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p.add_(0.3 * torch.randn_like(p))
    return model


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """case -> the folder that transformers wrote."""

    @functools.cache
    def folder(case: str):
        made = tmp_path_factory.mktemp(case)
        hf_model(case).save_pretrained(made)
        return made

    return folder


def tokens_and_rest() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, positions and segments [2, T]. 0 is Gemma's padding: transformers leaves it without a
    gradient."""
    tokens = np.random.default_rng(0).integers(1, VOCAB, (2, T))
    return tokens, np.broadcast_to(np.arange(T), tokens.shape), np.ones_like(tokens)


def logits_of(params, cfg: ModelConfig, tokens, positions, segments) -> jax.Array:
    hidden = forward(params, cfg, tokens, positions, segments, Precision.uniform(LAYERS))
    return logprobs.logits_of(hidden, head_weight(params, cfg), cfg.final_logit_softcapping)


@functools.partial(jax.jit, static_argnums=1)
def loss_and_grads(params, cfg: ModelConfig, tokens, positions, segments, directions):
    def loss(params):
        logits = logits_of(params, cfg, tokens, positions, segments)
        return jnp.sum(logits * directions), logits

    return jax.value_and_grad(loss, has_aux=True)(params)


def test_all_families_are_here():
    declared = {f.removesuffix("ForCausalLM") for f in FAMILIES} - {"Qwen3Moe"}  # it has tests of its own
    assert {kind for kind, _ in MODELS.values()} == declared


@pytest.mark.parametrize("case", MODELS)
def test_logits_and_gradients_are_those_of_transformers(case, folders):
    import torch

    model = hf_model(case)
    cfg, params = load_params(folders(case))
    tokens, positions, segments = tokens_and_rest()
    directions = np.random.default_rng(1).standard_normal((*tokens.shape, VOCAB)).astype(np.float32)
    theirs = model(torch.tensor(tokens)).logits
    model.zero_grad()
    (theirs * torch.tensor(directions)).sum().backward()
    theirs = theirs.detach().numpy()
    (_, ours), grads = loss_and_grads(params, cfg, tokens, positions, segments, directions)
    assert theirs.std() > 0.1
    np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max())
    by_name = dict(model.named_parameters())
    for entry in param_table(cfg):
        want, got = by_name[entry.hf_name].grad.numpy(), np.asarray(get_param(grads, entry))
        assert np.abs(want).max() > 0, entry.hf_name
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max(), err_msg=entry.hf_name)


@pytest.mark.parametrize("case", MODELS)
def test_a_saved_folder_is_read_by_transformers_with_equal_bytes(case, folders, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    cfg, params = load_params(folders(case))
    save_params(tmp_path / "ours", cfg, params, "float32")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="float32",
                                                 attn_implementation="eager")
    want = hf_model(case).state_dict()
    assert again.state_dict().keys() == want.keys()
    for name, tensor in again.state_dict().items():
        assert tensor.numpy().tobytes() == want[name].numpy().tobytes(), name
    theirs, ours = again.config.to_dict(), hf_model(case).config.to_dict()
    for key in ("rope_parameters", "layer_types", "sliding_window", "tie_word_embeddings",
                "query_pre_attn_scalar"):
        assert theirs.get(key) == ours.get(key), key
    assert ModelConfig.from_hf(tmp_path / "ours") == cfg
    assert ModelConfig.from_hf(theirs) == cfg


@pytest.mark.parametrize("case", MODELS)
def test_decode_with_a_cache_is_the_whole_forward(case, folders):
    cfg, params = load_params(folders(case))
    precision = Precision.uniform(LAYERS)
    tokens, positions, segments = tokens_and_rest()
    whole = jax.jit(forward, static_argnums=(1, 5))(params, cfg, tokens, positions, segments, precision)
    cached = jax.jit(forward_cached, static_argnums=(1, 5))
    cache, start, parts = init_cache(cfg, len(tokens), T + 3, precision), 0, []
    for stop in (T // 2, *range(T // 2 + 1, T // 2 + 5)):
        hidden, cache = cached(params, cfg, tokens[:, start:stop], positions[:, start:stop], cache, precision)
        start = stop
        parts.append(hidden)
    np.testing.assert_allclose(jnp.concatenate(parts, 1), whole[:, :stop], atol=1e-4)


@pytest.mark.parametrize("case", ["mistral", "gemma3", "qwen2"])
def test_packed_sequences_do_not_see_each_other(case, folders):
    cfg, params = load_params(folders(case))
    tokens, positions, _ = tokens_and_rest()
    tokens, cut = tokens[:1], 40
    where = np.concatenate([np.arange(cut), np.arange(T - cut)])[None]
    ids = np.where(np.arange(T) < cut, 1, 2)[None]
    run = jax.jit(logits_of, static_argnums=1)
    packed = run(params, cfg, tokens, where, ids)
    alone = np.zeros((1, T), np.int32)
    alone[0, : T - cut] = tokens[0, cut:]
    second = run(params, cfg, alone, positions[:1], np.where(np.arange(T) < T - cut, 1, 0)[None])
    np.testing.assert_allclose(packed[0, cut:], second[0, : T - cut], atol=1e-4)


@pytest.mark.parametrize("case", MODELS)
def test_fresh_parameters_have_the_shapes_of_the_table(case, folders):
    cfg = ModelConfig.from_hf(folders(case))
    tree = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    for entry in param_table(cfg):
        leaf = functools.reduce(lambda node, key: node[key], entry.path, tree)
        assert leaf.shape[len(entry.index):] == entry.shape, entry.hf_name
    assert len(jax.tree.leaves(tree)) == len({entry.path for entry in param_table(cfg)})


@pytest.mark.parametrize("change", [
    {}, {"truncate": False}, {"truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
    {"attention_factor": 0.7}, {"mscale": 0.8, "mscale_all_dim": 1.1},
])
def test_yarn_frequencies_are_those_of_transformers(change):
    """To the last place but one, with every key that it knows. `truncate = false` keeps the ramp's
    fractions."""
    pytest.importorskip("transformers")
    from transformers import Qwen2Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    raw = SIZES | {"head_dim": 64, "rope_parameters": YARN | change}
    cfg = ModelConfig.from_hf(raw | {"architectures": ["Qwen2ForCausalLM"]})
    rope = ModelConfig.from_hf(cfg.to_hf()).kinds[0].rope  # written and read
    want, amplitude = ROPE_INIT_FUNCTIONS["yarn"](Qwen2Config(**raw), "cpu")
    np.testing.assert_allclose(rope.frequencies(64), want.numpy(), rtol=3e-7)
    assert rope.amplitude == pytest.approx(amplitude, rel=1e-12)
    whole = Rope(rope.theta, dataclasses.replace(rope.scaling, truncate=True)).frequencies(64)
    assert np.allclose(whole, want, rtol=1e-3) is change.get("truncate", True)


# --- Gemma's spellings, and refusals

GEMMA_270M = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262144,
    "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "num_attention_heads": 4,
    "num_key_value_heads": 1, "max_position_embeddings": 32768, "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "_sliding_window_pattern": 6,
}


def test_gemma_is_read_in_the_spelling_of_transformers_4():
    cfg = ModelConfig.from_hf(GEMMA_270M)
    full = [i for i, kind in enumerate(cfg.layer_kinds) if kind.window is None]
    assert full == [5, 11, 17] and cfg.head_dim == 256 and cfg.tie_word_embeddings
    assert {kind.rope.theta: kind.window for kind in cfg.kinds} == {1e4: 512, 1e6: None}
    assert (cfg.bos_token_id, cfg.eos_token_ids, cfg.pad_token_id) == (2, (1,), 0)
    assert cfg.attention_scale == 1 / 16
    assert ModelConfig.from_hf(cfg.to_hf()) == cfg and "rope_theta" not in cfg.to_hf()


def test_gemmas_soft_cap_is_read_and_written():
    assert ModelConfig.from_hf(GEMMA_270M | {"final_logit_softcapping": None}).final_logit_softcapping is None
    capped = ModelConfig.from_hf(GEMMA_270M | {"final_logit_softcapping": 30})
    assert capped.final_logit_softcapping == 30.0 and ModelConfig.from_hf(capped.to_hf()) == capped


@pytest.mark.parametrize("change, says", [
    ({"final_logit_softcapping": 0.0}, "final_logit_softcapping must be a finite number above 0, got 0.0"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0 is not implemented"),
    ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"hidden_activation": "silu"}, "hidden_activation = 'silu'.*'gelu_pytorch_tanh'"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_parameters has no table"),
    ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "has a scaling"),
    ({"layer_types": ["full_attention", "chunked_attention"] * 9}, "layer_types has chunked_attention"),
    ({"sliding_window": None}, "sliding_window must be a positive integer"),
    ({"sliding_window": 0}, "sliding_window must be a positive integer"),
])
def test_gemma_refuses_by_name(change, says):
    with pytest.raises(ModelError, match=says):
        ModelConfig.from_hf(GEMMA_270M | change)


def test_a_window_of_mistral_is_absent_null_or_a_number():
    raw = {**SIZES, "architectures": ["MistralForCausalLM"]}
    windows = [ModelConfig.from_hf(raw | change).sliding_window
               for change in ({}, {"sliding_window": None}, {"sliding_window": 12})]
    assert windows == [4096, None, 12]
    for change in ({"sliding_window": 0}, {"layer_types": ["full_attention"] * LAYERS}):
        with pytest.raises(ModelError, match=next(iter(change))):
            ModelConfig.from_hf(raw | change)


def test_windows_of_qwen2_that_are_off_change_nothing(tmp_path):
    raw = {**SIZES, "architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False,
           "sliding_window": 131072, "max_window_layers": 2}
    cfg = ModelConfig.from_hf(raw)
    assert [kind.window for kind in cfg.kinds] == [None]
    assert json.loads(json.dumps(cfg.to_hf()))["sliding_window"] == 131072


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_search_the_docs_and_the_error_name_every_architecture(architecture):
    assert "model.path" in {setting.name for setting in find(architecture)}
    assert f"`{architecture}`" in (Path(__file__).parents[3] / "docs/models.md").read_text()
    with pytest.raises(ModelError, match=architecture):
        ModelConfig.from_hf({"architectures": ["OtherForCausalLM"]})
