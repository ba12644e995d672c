"""config.json in, ModelConfig, config.json out: nothing lost, nothing unsupported let through."""

from __future__ import annotations

import json

import pytest

from jaxfp8rl.errors import ModelError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.rope import Llama3Rope

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
    "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
    "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "vocab_size": 128256,
}
ROPE_KEYS = {"rope_scaling", "rope_theta", "rope_parameters", "torch_dtype"}


def test_qwen3_is_read():
    cfg = ModelConfig.from_hf(QWEN3_06B)
    assert (cfg.hidden_size, cfg.head_dim, cfg.num_key_value_heads, cfg.rope_theta) == (1024, 128, 8, 1e6)
    assert cfg.family.qk_norm and cfg.tie_word_embeddings and cfg.rope_scaling is None
    assert cfg.eos_token_ids == (151645,) and cfg.pad_token_id is None and cfg.dtype == "bfloat16"
    hash(cfg)  # a static argument of jit


def test_llama3_is_read():
    cfg = ModelConfig.from_hf(LLAMA_32_1B)
    assert cfg.rope_scaling == Llama3Rope(32.0, 1.0, 4.0, 8192)
    assert not cfg.family.qk_norm and cfg.eos_token_ids == (128001, 128008, 128009)


def test_llama_head_dim_and_kv_heads_are_derived():
    raw = {k: v for k, v in LLAMA_32_1B.items() if k not in ("head_dim", "num_key_value_heads")}
    cfg = ModelConfig.from_hf(raw)
    assert (cfg.head_dim, cfg.num_key_value_heads) == (64, 32)


def test_transformers_5_spelling_of_rope_is_equal():
    old = ModelConfig.from_hf(LLAMA_32_1B)
    raw = {k: v for k, v in LLAMA_32_1B.items() if k not in ROPE_KEYS}
    raw["rope_parameters"] = {**LLAMA_32_1B["rope_scaling"], "rope_theta": 500000.0}
    assert ModelConfig.from_hf(raw) == old


@pytest.mark.parametrize("raw", [QWEN3_06B, LLAMA_32_1B], ids=["qwen3", "llama3"])
def test_round_trip_keeps_every_key(raw, tmp_path):
    cfg = ModelConfig.from_hf(raw)
    out = cfg.to_hf()
    assert {k: out[k] for k in raw
            if k not in ROPE_KEYS} == {k: v for k, v in raw.items() if k not in ROPE_KEYS}
    (tmp_path / "config.json").write_text(json.dumps(out))
    again = ModelConfig.from_hf(tmp_path)
    assert again == cfg == ModelConfig.from_hf(tmp_path / "config.json") and again.to_hf() == out


@pytest.mark.parametrize("raw", [QWEN3_06B, LLAMA_32_1B], ids=["qwen3", "llama3"])
def test_transformers_reads_what_we_write(raw, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text(json.dumps(ModelConfig.from_hf(raw).to_hf()))
    theirs = AutoConfig.from_pretrained(tmp_path)
    rope = {"rope_type": "default"} if raw["rope_scaling"] is None else raw["rope_scaling"]
    assert theirs.rope_parameters == {**rope, "rope_theta": raw["rope_theta"]}
    assert (theirs.head_dim, theirs.vocab_size, theirs.eos_token_id) == (
        raw["head_dim"], raw["vocab_size"], raw["eos_token_id"])
    assert ModelConfig.from_hf(theirs.to_dict()) == ModelConfig.from_hf(raw)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"architectures": ["GPTNeoXForCausalLM"]},
         r"GPTNeoXForCausalLM'\] is not implemented\n.*Qwen3ForCausalLM"),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, 'the nearest is "Gemma3ForCausalLM"'),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'.*'silu'"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config.*\n.*unquantised"),
        ({"layer_types": ["full_attention"]}, "names 1 layers, num_hidden_layers is"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_scaling.rope_type = 'longrope'"),
        ({"rope_scaling": {"type": "linears", "factor": 2.0}}, 'did you mean "linear"'),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type linear needs numbers for factor"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
         "needs numbers for low_freq_factor, high_freq_factor"),
        ({"rope_parameters": {"rope_theta": 1.0}}, "rope_theta has two values"),
        ({"rope_parameters": {**LLAMA_32_1B["rope_scaling"], "factor": 2.0},
          "rope_scaling": LLAMA_32_1B["rope_scaling"]},
         "disagree"),
        ({"hidden_size": None}, "hidden_size must be a positive integer, got None"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"head_dim": None}, "head_dim must be a positive integer"),
        ({"head_dim": 63}, "head_dim = 63 is odd"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads = 3"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype = 'float8_e4m3fn'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, says):
    with pytest.raises(ModelError, match=says):
        ModelConfig.from_hf({**QWEN3_06B, **change})


def test_missing_and_broken_files(tmp_path):
    with pytest.raises(ModelError, match=r"no model config at .*config\.json"):
        ModelConfig.from_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": ')
    with pytest.raises(ModelError, match="not valid JSON.*line 1"):
        ModelConfig.from_hf(tmp_path)
