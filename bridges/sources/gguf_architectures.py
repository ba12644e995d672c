"""The architectures that a GGUF file may have, and llama.cpp's names for their tensors.

llama.cpp reorders the rows of Llama's q and k for its RoPE, and adds one to Gemma's norms. Both are undone
here (convert_hf_to_gguf.py: `LlamaModel.permute`, `Gemma3Model.norm_shift`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from bridges.api import BridgeError
from bridges.sources.gguf_header import Header, TensorEntry

ROPE_FREQS = "rope_freqs.weight"  # Llama 3's RoPE scaling; read with the config
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclasses.dataclass(frozen=True)
class Architecture:
    """model_type, hf_class: transformers' names. layer: GGUF's name of a layer's module -> transformers'.
    biased: the modules with a bias. permuted: whether rows of q and k are. unit_offset: whether norms are
    stored as 1 + weight. keys: metadata that others do not have."""

    model_type: str
    hf_class: str
    layer: Mapping[str, str]
    biased: tuple[str, ...] = ()
    permuted: bool = False
    unit_offset: bool = False
    keys: tuple[str, ...] = ()


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _LAYER, permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _LAYER, biased=("attn_q", "attn_k", "attn_v")),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _LAYER | _HEAD_NORMS),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _LAYER | _HEAD_NORMS | _SANDWICH,
                           unit_offset=True, keys=("attention.sliding_window", "rope.freq_base_swa",
                                                   "attention.sliding_window_pattern")),
}


def architecture_of(header: Header) -> Architecture:
    """Raises BridgeError, with the known names, for an architecture that is not among them."""
    name = header.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise BridgeError(f"{header.path}: the architecture {name!r} is not known",
                          f"known are {', '.join(ARCHITECTURES)}; convert others with transformers")
    return ARCHITECTURES[name]


def hf_names(architecture: Architecture, header: Header, layers: int) -> dict[str, str]:
    """GGUF's name of every tensor of a model -> transformers'. Raises BridgeError, naming it, for a tensor
    that is missing from the file or not known: it would change the arithmetic."""
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    names |= {f"blk.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight"
              for i in range(layers) for ours, theirs in architecture.layer.items()}
    names |= {f"blk.{i}.{ours}.bias": f"model.layers.{i}.{architecture.layer[ours]}.bias"
              for i in range(layers) for ours in architecture.biased}
    have = {t.name for t in header.tensors}
    if "output.weight" in have:  # otherwise the head is the embedding
        names["output.weight"] = "lm_head.weight"
    kind = header.metadata["general.architecture"]
    if missing := sorted(names.keys() - have):
        raise BridgeError(f"{header.path}: {missing[0]} is missing ({len(missing)} tensors are)",
                          f"take a complete file of the architecture {kind}")
    if unknown := sorted(have - names.keys() - {ROPE_FREQS}):
        raise BridgeError(f"{header.path}: the architecture {kind} has no tensor {unknown[0]} here "
                          f"({len(unknown)} tensors are not known)",
                          "take a file of a plain dense model of this architecture")
    return names


def read_tensor(header: Header, entry: TensorEntry) -> np.ndarray:
    """The tensor's values in float32, in the shape that torch has, as gguf-py dequantises them."""
    from gguf import GGMLQuantizationType, dequantize

    data = np.fromfile(header.path, np.uint8, entry.nbytes, offset=entry.start)
    kind = GGMLQuantizationType[entry.type]
    return dequantize(data.reshape(*entry.shape[:-1], -1), kind).reshape(entry.shape)


def hf_tensors(header: Header, architecture: Architecture,
               config: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """(transformers' name, values in BF16 by ml_dtypes) of every tensor, in the order of the file."""
    import ml_dtypes

    names = hf_names(architecture, header, config["num_hidden_layers"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for entry in header.tensors:
        if entry.name not in names:
            continue
        x, module = read_tensor(header, entry), entry.name.split(".")[-2]
        if architecture.permuted and module in heads:
            x = _halves_apart(x, heads[module])
        if architecture.unit_offset and module.endswith("norm"):
            x = x - 1
        yield names[entry.name], x.astype(ml_dtypes.bfloat16)


def _halves_apart(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, in] as transformers rotates them, i with i + head_dim / 2, from llama.cpp's
    order, in which both are neighbours."""
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
