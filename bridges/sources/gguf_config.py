"""The config.json of a GGUF file.

Everything under the architecture's name in the metadata is read, or the file is refused: transformers' own
reader (5.19) leaves out RoPE scaling, the head size of Qwen3 and Gemma's query scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bridges.api import BridgeError
from bridges.sources.gguf_architectures import ROPE_FREQS, Architecture, read_tensor
from bridges.sources.gguf_header import Header

_SIZES = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_SCALING = {"rope.scaling.type", "rope.scaling.factor", "rope.scaling.original_context_length"}
_READ = _SIZES.keys() | _SCALING | {
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "vocab_size", "rope.scaling.finetuned",
}
_GEMMA3_27B_LAYERS = 62  # llama.cpp tells it by these, too: it alone has a query scale of its own


def config_of(header: Header, architecture: Architecture) -> dict[str, Any]:
    """The fields of config.json.

    Raises BridgeError for metadata of the architecture that is missing, not known or not supported, such as
    partial rotation: it would change the arithmetic.
    """
    facts = _Facts(header)
    facts.refuse_unknown({*_READ, *architecture.keys})
    sizes = {theirs: facts.number(ours) for ours, theirs in _SIZES.items()}
    heads = sizes["num_attention_heads"]
    head_dim = facts.number("attention.key_length", facts.number("rope.dimension_count",
                                                                 sizes["hidden_size"] // heads))
    for key in ("rope.dimension_count", "attention.value_length"):
        if facts.number(key, head_dim) != head_dim:
            raise facts.refused(key, f"heads of {head_dim} need {head_dim} here")
    names = {t.name: t for t in header.tensors}
    return {
        "architectures": [architecture.hf_class], "model_type": architecture.model_type, "dtype": "bfloat16",
        **sizes, "head_dim": head_dim, "num_key_value_heads": facts.number("attention.head_count_kv", heads),
        "rms_norm_eps": facts.decimal("attention.layer_norm_rms_epsilon"),
        "vocab_size": names["token_embd.weight"].shape[0] if "token_embd.weight" in names else 0,
        "tie_word_embeddings": "output.weight" not in names,
        **special_ids(header.metadata),
        **(_gemma3(facts, sizes, head_dim) if architecture.unit_offset
           else {"rope_parameters": _rope(facts, head_dim)}),
    }


def special_ids(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """bos_token_id, eos_token_id (a list where a turn ends with another token) and pad_token_id."""
    ends = dict.fromkeys(metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    eos = [i for i in ends if i is not None]
    return {"bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id")}


class _Facts:
    """The metadata under the architecture's name."""

    def __init__(self, header: Header):
        self.header, self.prefix = header, header.metadata["general.architecture"] + "."
        self._values = {key.removeprefix(self.prefix): value for key, value in header.metadata.items()
                        if key.startswith(self.prefix)}

    def refused(self, key: str, why: str) -> BridgeError:
        return BridgeError(f"{self.header.path}: {self.prefix}{key} = {self._values.get(key)!r}: {why}",
                           "take a file without it, or convert the model with transformers")

    def refuse_unknown(self, known: set[str]) -> None:
        for key in sorted(self._values.keys() - known):
            raise self.refused(key, "the import does not know this key, which may change the arithmetic")

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def number(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key, default)
        if not isinstance(value, int) or value < 1:
            raise self.refused(key, "a positive whole number is needed")
        return value

    def decimal(self, key: str, default: float | None = None) -> float:
        """The shortest decimal that float32 rounds to the value: 1e-6, not 9.999999974752427e-07."""
        value = self._values.get(key, default)
        if not isinstance(value, float):
            raise self.refused(key, "a number with a fraction is needed")
        return float(str(np.float32(value)))


def _rope(facts: _Facts, head_dim: int) -> dict[str, Any]:
    """The rotation: its base and, if there is one, its scaling."""
    theta = facts.decimal("rope.freq_base", 10000.0)
    kind = facts.get("rope.scaling.type") or "none"
    if kind not in ("none", "linear", "yarn"):
        raise facts.refused("rope.scaling.type", "none, linear and yarn are known")
    if kind == "none":
        return {"rope_theta": theta} | (_llama3(facts, theta, head_dim) or {"rope_type": "default"})
    scaling = {"rope_type": kind, "rope_theta": theta, "factor": facts.decimal("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = facts.number("rope.scaling.original_context_length")
    return scaling


def _llama3(facts: _Facts, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The scaling of Llama 3.1 and 3.2, which a GGUF keeps as a tensor of factors. None without one.

    Raises BridgeError for factors that no scaling with Llama 3's bounds gives.
    """
    entry = next((t for t in facts.header.tensors if t.name == ROPE_FREQS), None)
    if entry is None:
        return None
    factors = read_tensor(facts.header, entry)
    scaling = {"rope_type": "llama3", "factor": float(factors.max()), "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    expected = _llama3_factors(scaling, theta, head_dim)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-4):
        raise BridgeError(f"{facts.header.path}: {ROPE_FREQS} is not a RoPE scaling as Llama 3 has it",
                          "convert the model with transformers")
    return scaling


def _llama3_factors(scaling: Mapping[str, Any], theta: float, head_dim: int) -> np.ndarray:
    """The factor of each wavelength [head_dim / 2] (convert_hf_to_gguf.py: `generate_extra_tensors`)."""
    length, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    waves = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((length / waves - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _gemma3(facts: _Facts, sizes: Mapping[str, int], head_dim: int) -> dict[str, Any]:
    """Windows in all layers but every sixth, with a RoPE base of their own, and the query scale."""
    layers, pattern = sizes["num_hidden_layers"], facts.number("attention.sliding_window_pattern", 6)
    local = {"rope_type": "default", "rope_theta": facts.decimal("rope.freq_base_swa", 10000.0)}
    wide = sizes["hidden_size"] // sizes["num_attention_heads"]
    return {
        "sliding_window": facts.number("attention.sliding_window"),
        "layer_types": ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
                        for i in range(layers)],
        "rope_parameters": {"full_attention": _rope(facts, head_dim), "sliding_attention": local},
        "query_pre_attn_scalar": wide if layers == _GEMMA3_27B_LAYERS else head_dim,
    }
