"""What is asked of hardware is refused where it is not there, and where the kernels are not for the model."""

from __future__ import annotations

import dataclasses

import pytest

from bridges.api import EngineFormats
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.hardware import attention_of, computed_by, products_of
from jaxfp8rl.precision.recipe import LayerRun, Precision, get_recipe, resolve

MODEL = ModelConfig.from_hf({
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64, "tie_word_embeddings": True, "rope_theta": 1e4, "hidden_act": "silu", "attention_bias": False,
})  # fmt: skip
FP8 = {"weights": "fp8_e4m3_128x128", "activations": "fp8_e4m3_1x128"}


class Gpu:
    platform, device_kind = "gpu", "a GPU"

    def __init__(self, capability):
        self.compute_capability = capability


@pytest.mark.parametrize(
    ("capability", "dtype", "taken"),
    [("9.0", "bfloat16", "pallas"), ("9.0", "float32", "pallas"), ("9.0", "float16", "tensor_core"),
     ("10.0", "bfloat16", "tensor_core"), ("8.9", "bfloat16", "tensor_core"), ("8.0", "bfloat16", "float32")],
)  # fmt: skip
def test_auto_takes_the_best_products_there_are(monkeypatch, capability, dtype, taken):
    monkeypatch.setattr("jax.devices", lambda: [Gpu(capability)])
    assert products_of("auto", dtype) == products_of(taken, dtype) == taken
    if taken != "pallas":
        with pytest.raises(ConfigError, match="needs a Hopper GPU .*this is a GPU"):
            products_of("pallas", dtype)


def test_on_a_cpu_products_are_in_float32():
    assert products_of("auto", "bfloat16") == "float32"
    with pytest.raises(ConfigError, match="needs a GPU with FP8 tensor cores; this is cpu"):
        products_of("tensor_core", "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "head_dim", "message"),
    [("float32", 64, "takes bfloat16 or float16, precision.compute_dtype is .float32"),
     ("bfloat16", 96, "heads of 64 and 128.*of 96"), ("float16", 128, "needs a Hopper GPU .capability 9.0., this is cpu")],
)  # fmt: skip
def test_attention_by_kernels_says_what_it_needs_and_auto_leaves_it(dtype, head_dim, message):
    model = dataclasses.replace(MODEL, head_dim=head_dim)
    with pytest.raises(ConfigError, match=message):
        attention_of("pallas", dtype, model)
    assert attention_of("auto", dtype, model) == attention_of("xla", dtype, model) == "xla"


@pytest.mark.parametrize(("capability", "taken"), [("9.0", "pallas"), ("10.0", "xla"), ("8.0", "xla")])
def test_auto_takes_the_kernels_attention_on_hopper(monkeypatch, capability, taken):
    monkeypatch.setattr("jax.devices", lambda: [Gpu(capability)])
    assert attention_of("auto", "bfloat16", MODEL) == taken and attention_of("xla", "bfloat16", MODEL) == "xla"


def test_attention_of_either_kind_rounds_as_the_engines_does():
    formats = EngineFormats(**FP8, kv_cache="fp8_e4m3", compute="bfloat16", attention="fp8_e4m3")
    runs = (LayerRun(0, 1, frozenset()),)
    resolved = lambda recipe, attention: resolve(get_recipe(recipe), runs, formats, "bfloat16", "bfloat16", attention=attention)
    for attention in ("xla", "pallas"):
        assert resolved("fp8_unified", attention).attention_fp8 and resolved("fp8_unified", attention).attention == attention
        assert not resolved("fp8_rollout", attention).attention_fp8  # whose learner does not round at all


def test_a_run_says_what_computes():
    high = Precision.uniform(1, "bfloat16", attention="pallas", rope_dtype="bfloat16")
    assert computed_by(high) == 'learner: attention by "pallas"'
    fp8 = Precision((LayerRun(0, 1, frozenset({"o_proj"})),), products="tensor_core")
    fp8 = dataclasses.replace(fp8, rope_dtype="bfloat16")
    assert computed_by(fp8) == 'learner: FP8 products by "tensor_core", attention by "xla"'
    said = computed_by(dataclasses.replace(fp8, compute_dtype="float32"))
    assert 'in float32 where the engine computes in bfloat16' in said and 'precision.compute_dtype = "bfloat16"' in said
