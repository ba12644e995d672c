"""Tiny GGUF files of every architecture and of the types that models are published in: the folder holds what
gguf-py dequantises, in transformers' order, and whatever would change the arithmetic is refused."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

for needed in ("gguf", "torch", "transformers"):
    pytest.importorskip(needed)

import tiny_gguf as tiny

from bridges.api import BridgeError
from bridges.sources import gguf_config, gguf_header
from bridges.sources.gguf_architectures import ARCHITECTURES
from bridges.sources.gguf_import import import_gguf
from jaxfp8rl.data.dataset import encode_prompt
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import load_params

LAYER = {  # a module that every architecture has -> its name in the folder
    "attn_q.weight": "self_attn.q_proj.weight", "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight", "attn_output.weight": "self_attn.o_proj.weight",
    "attn_norm.weight": "input_layernorm.weight", "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight", "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight", "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_q.bias": "self_attn.q_proj.bias", "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
}
GEMMA = {"ffn_norm.weight": "pre_feedforward_layernorm.weight",
         "post_attention_norm.weight": "post_attention_layernorm.weight",
         "post_ffw_norm.weight": "post_feedforward_layernorm.weight"}
WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
         "output.weight": "lm_head.weight"}


def hf_name(arch: str, name: str) -> str:
    if name in WHOLE:
        return WHOLE[name]
    _, layer, module = name.split(".", 2)
    return f"model.layers.{layer}." + (LAYER | (GEMMA if arch == "gemma3" else {}))[module]


def rotated_as_transformers(x: np.ndarray, heads: int) -> np.ndarray:
    """Row i of the first half of a head lies at 2i in the file, its partner at 2i + 1."""
    d = len(x) // heads
    return x[[h * d + 2 * i + half for h in range(heads) for half in (0, 1) for i in range(d // 2)]]


def expected(arch: str, name: str, x: np.ndarray) -> np.ndarray:
    if arch == "llama" and ".attn_q." in name:
        x = rotated_as_transformers(x, tiny.HEADS)
    if arch == "llama" and ".attn_k." in name:
        x = rotated_as_transformers(x, tiny.KV_HEADS)
    return x - 1 if arch == "gemma3" and "norm" in name else x


def imported(tmp_path, *args, **kwargs):
    values = tiny.write(tmp_path / "model.gguf", *args, **kwargs)
    return values, import_gguf(tmp_path / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q8_0", "F16", "BF16"])
@pytest.mark.parametrize("arch", tiny.HEAD_DIM)
def test_the_folder_holds_what_gguf_py_dequantises(arch, kind, tmp_path):
    from safetensors.torch import load_file

    values, out = imported(tmp_path, arch, kind)
    found = {name: x.float().numpy() for name, x in load_file(out / "model.safetensors").items()}
    assert found.keys() == {hf_name(arch, name) for name in values}
    for name, x in values.items():
        want = np.asarray(jnp.asarray(expected(arch, name, x), jnp.bfloat16), np.float32)
        np.testing.assert_array_equal(found[hf_name(arch, name)], want, err_msg=name)


@pytest.mark.parametrize("arch", tiny.HEAD_DIM)
def test_both_readers_take_the_folder_whole(arch, tmp_path):
    """transformers finds every weight it needs, and its config and ours agree on what the file says."""
    from transformers import AutoModelForCausalLM

    _, out = imported(tmp_path, arch)
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours, (_, params) = ModelConfig.from_hf(out), load_params(out)
    assert params and model.config.head_dim == ours.head_dim == tiny.HEAD_DIM[arch]
    assert model.config.rms_norm_eps == ours.rms_norm_eps == 1e-6
    assert (ours.architecture, ours.rope_theta) == (ARCHITECTURES[arch].hf_class, 1e5)
    assert (ours.bos_token_id, ours.eos_token_ids) == (tiny.BOS, (tiny.EOS,))
    if arch == "gemma3":  # the file does not say this: llama.cpp takes the head size
        assert model.config.query_pre_attn_scalar == ours.query_pre_attn_scalar == 128
        assert ours.layer_types == ("sliding_attention",) * 2 and ours.sliding_window == 16


def test_every_known_type_is_one_that_gguf_py_dequantises():
    import gguf

    for name in gguf_header.TYPES:
        kind = gguf.GGMLQuantizationType[name]
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        assert gguf.dequantize(np.zeros((1, size), np.uint8), kind).size == elements, name


@pytest.mark.parametrize("bos, pre, begins", [
    (True, "default", True), (False, "default", False), (None, "default", False), (None, "llama-bpe", True),
    (False, "llama-bpe", False),
])
def test_a_text_begins_with_bos_where_the_file_says_so(bos, pre, begins, tmp_path):
    """llama.cpp's default, where the file is silent, is that of the vocabulary. A chat template writes its
    own BOS, and there is still one."""
    from transformers import AutoTokenizer

    _, out = imported(tmp_path, "qwen2", bos=bos, pre=pre)
    tokenizer = load_tokenizer(str(out))
    front = (tiny.BOS,) if begins else ()
    for ids in (AutoTokenizer.from_pretrained(out)("abc").input_ids, tokenizer.encode("abc"),
                encode_prompt(Problem("0", "abc", "1"), tokenizer)):
        assert tuple(ids[:len(front)]) == front and len(ids) == 2 + len(front)
        assert list(ids).count(tiny.BOS) == len(front)
    (out / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    chat = encode_prompt(Problem("0", [{"role": "user", "content": "abc"}], "1"), load_tokenizer(str(out)))
    assert chat[0] == tiny.BOS and chat.count(tiny.BOS) == 1


def test_a_file_without_the_bos_that_it_wants_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("gguf.GGUFWriter.add_bos_token_id", lambda *_: None)
    with pytest.raises(BridgeError, match="names no BOS"):
        imported(tmp_path, "qwen2", bos=True)


def test_an_import_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("gguf.GGUFWriter.add_tokenizer_model", lambda writer, _: writer.add_string(
        "tokenizer.ggml.model", "rwkv"))
    with pytest.raises(BridgeError, match="cannot build the tokenizer of .*rwkv"):
        imported(tmp_path, "qwen3")
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_llama_3s_rope_scaling_comes_back_from_its_factors(tmp_path):
    """A GGUF keeps it as a tensor alone, which transformers' reader drops."""
    import torch
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192, "rope_theta": 1e5}
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=scaling)
    plain = 1e5 ** -(torch.arange(0, 64, 2) / 64)
    factors = np.round((plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]).numpy(), 5)
    _, out = imported(tmp_path, extra={"rope_freqs.weight": factors})
    assert json.loads((out / "config.json").read_text())["rope_parameters"] == scaling
    ModelConfig.from_hf(out)
    with pytest.raises(BridgeError, match="rope_freqs.weight is not a RoPE scaling as Llama 3 has it"):
        tiny.write(tmp_path / "other.gguf", extra={"rope_freqs.weight": factors + 0.1})
        import_gguf(tmp_path / "other.gguf", tmp_path / "other")


def test_rope_scaling_in_the_metadata_is_kept(tmp_path):
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128}
    _, out = imported(tmp_path, "qwen3", settings=yarn)
    assert json.loads((out / "config.json").read_text())["rope_parameters"] == {
        "rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 128}
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
    tiny.write(tmp_path / "gemma.gguf", "gemma3", settings=linear)
    out = import_gguf(tmp_path / "gemma.gguf", tmp_path / "gemma")
    rope = json.loads((out / "config.json").read_text())["rope_parameters"]
    assert rope["full_attention"]["factor"] == 8.0 and rope["sliding_attention"]["rope_type"] == "default"


def test_the_scale_of_gemma_3_27b_is_its_own():
    metadata = {"general.architecture": "gemma3", "gemma3.attention.sliding_window": 1024}
    header = gguf_header.Header(Path("27b"), metadata, (), 32)
    sizes = {"num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32}
    assert gguf_config._gemma3(gguf_config._Facts(header), sizes, 128)["query_pre_attn_scalar"] == 168


@pytest.mark.parametrize("made, says", [
    ({"settings": {"rope.scaling.type": "longrope"}},
     "llama.rope.scaling.type = 'longrope': none, linear and yarn are known"),
    ({"settings": {"rope.dimension_count": 32}, "arch": "qwen3"},
     "qwen3.rope.dimension_count = 32: heads of 128 need 128"),
    ({"settings": {"attention.logit_scale": 2.0}},
     "llama.attention.logit_scale = 2.0: the import does not know this key"),
    ({"settings": {"split.count": 3}}, "one of 3 files of a split model"),
    ({"leave_out": ("block_count",)}, "llama.block_count = None: a positive whole number is needed"),
    ({"leave_out": ("blk.1.ffn_up.weight",)}, "blk.1.ffn_up.weight is missing"),
    ({"extra": {"blk.0.ffn_gate_exps.weight": np.zeros((2, 4), np.float32)}},
     "the architecture llama has no tensor blk.0.ffn_gate_exps.weight"),
    ({"extra": {"whole": np.zeros(4, np.int32)}}, "tensors of the type I32, whole for one, cannot be read"),
])
def test_what_would_change_the_arithmetic_is_refused_at_once(made, says, tmp_path, monkeypatch):
    import gguf

    tiny.write(tmp_path / "model.gguf", **made)
    monkeypatch.setattr(gguf, "dequantize", lambda *_: pytest.fail("loaded"))
    with pytest.raises(BridgeError) as refused:
        import_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert says in str(refused.value) and "next step" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_other_architectures_and_types_are_refused_with_the_known_ones(tmp_path, monkeypatch):
    monkeypatch.setitem(tiny.HEAD_DIM, "phi3", 64)
    tiny.write(tmp_path / "phi.gguf", "phi3")
    with pytest.raises(BridgeError, match=r"'phi3' is not known\n.*known are llama, qwen2, qwen3, gemma3"):
        import_gguf(tmp_path / "phi.gguf", tmp_path / "out")
    data = (tmp_path / "phi.gguf").read_bytes()
    entry = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    (tmp_path / "new.gguf").write_bytes(data[:entry] + (99).to_bytes(4, "little") + data[entry + 4:])
    with pytest.raises(BridgeError, match=r"type number 99, token_embd.weight for.*\n.*F32, F16, BF16, Q4_0"):
        import_gguf(tmp_path / "new.gguf", tmp_path / "out")


@pytest.mark.parametrize("change, says", [
    (lambda data: data[:-100], "but its table of tensors ends at"),
    (lambda data: data + b"\0" * 64, "but its table of tensors ends at"),
    (lambda data: data[:300], "damaged or cut short"),
    (lambda data: b"GGUF\1" + data[5:], "GGUF version 1"),
])
def test_a_damaged_file_is_refused(change, says, tmp_path):
    tiny.write(tmp_path / "good.gguf")
    (tmp_path / "bad.gguf").write_bytes(change((tmp_path / "good.gguf").read_bytes()))
    with pytest.raises(BridgeError, match=says):
        import_gguf(tmp_path / "bad.gguf", tmp_path / "out")
