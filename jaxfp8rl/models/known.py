"""Shapes of published models as their config.json has them, so that a run can be planned before its model is
downloaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxfp8rl.errors import ModelError, nearest
from jaxfp8rl.models.config import MOE, ModelConfig
from jaxfp8rl.models.packed_config import Packed, form_named

_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
}
_QWEN3_MOE = _QWEN3 | {
    "architectures": [MOE], "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
_LLAMA3 = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False,
}
_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936, "num_key_value_heads": 2,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
}
_MISTRAL = {
    "architectures": ["MistralForCausalLM"], "vocab_size": 32768, "num_key_value_heads": 8,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None,
}
_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262144, "num_key_value_heads": 1, "head_dim": 256,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "sliding_window": 512,
}
_SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 49152, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0, "tie_word_embeddings": True,
}
_TIED, _LONG = {"tie_word_embeddings": True}, {"max_position_embeddings": 262144}


def _sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    return {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
            "num_attention_heads": heads}


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 8192}}


KNOWN: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _QWEN3 | _sizes(1024, 3072, 28, 16) | _TIED,
    "Qwen3-1.7B": _QWEN3 | _sizes(2048, 6144, 28, 16) | _TIED,
    "Qwen3-4B": _QWEN3 | _sizes(2560, 9728, 36, 32) | _TIED,
    "Qwen3-4B-Instruct-2507": _QWEN3 | _sizes(2560, 9728, 36, 32) | _TIED | _LONG | {"rope_theta": 5e6},
    "Qwen3-8B": _QWEN3 | _sizes(4096, 12288, 36, 32),
    "Qwen3-14B": _QWEN3 | _sizes(5120, 17408, 40, 40),
    "Qwen3-32B": _QWEN3 | _sizes(5120, 25600, 64, 64),
    "Qwen3-30B-A3B": _QWEN3_MOE | _sizes(2048, 6144, 48, 32) | {"moe_intermediate_size": 768},
    "Qwen3-30B-A3B-Instruct-2507": _QWEN3_MOE | _sizes(2048, 6144, 48, 32) | _LONG
    | {"moe_intermediate_size": 768,
                                                                                     "rope_theta": 1e7},
    "Qwen3-235B-A22B": _QWEN3_MOE | _sizes(4096, 12288, 94, 64) | {"moe_intermediate_size": 1536},
    "Qwen2.5-0.5B": _QWEN2 | _sizes(896, 4864, 24, 14) | _TIED,
    "Qwen2.5-1.5B": _QWEN2 | _sizes(1536, 8960, 28, 12) | _TIED,
    "Qwen2.5-3B": _QWEN2 | _sizes(2048, 11008, 36, 16) | _TIED,
    "Qwen2.5-7B": _QWEN2 | _sizes(3584, 18944, 28, 28) | {"num_key_value_heads": 4, "vocab_size": 152064},
    "Qwen2.5-14B": _QWEN2 | _sizes(5120, 13824, 48, 40) | {"num_key_value_heads": 8, "vocab_size": 152064},
    "Qwen2.5-32B": _QWEN2 | _sizes(5120, 27648, 64, 40) | {"num_key_value_heads": 8, "vocab_size": 152064},
    "Mistral-7B-v0.3": _MISTRAL | _sizes(4096, 14336, 32, 32),
    "gemma-3-270m": _GEMMA3 | _sizes(640, 2048, 18, 4),
    "gemma-3-1b": _GEMMA3 | _sizes(1152, 6912, 26, 4),
    "Llama-3.1-8B": _LLAMA3 | _sizes(4096, 14336, 32, 32) | _llama3_rope(8.0),
    "Llama-3.2-1B": _LLAMA3 | _sizes(2048, 8192, 16, 32) | _TIED | _llama3_rope(32.0),
    "Llama-3.2-3B": _LLAMA3 | _sizes(3072, 8192, 28, 24) | _TIED | _llama3_rope(32.0),
    "SmolLM2-135M": _SMOLLM2 | _sizes(576, 1536, 30, 9) | {"num_key_value_heads": 3},
    "SmolLM2-360M": _SMOLLM2 | _sizes(960, 2560, 32, 15) | {"num_key_value_heads": 5},
}
PLACE = Path("models")  # where the shipped configs have their models, none of which is there in a fresh clone
_BY_NAME = {name.lower(): name for name in KNOWN}
# the same shape; a base model of Qwen3 takes fewer positions, which no plan depends on
VARIANTS = "-instruct", "-base", "-it", "-pt"


def known_shape(path: str | Path) -> ModelConfig | None:
    """The shape of the published model that the folder at `path` is named after, "Qwen3-8B-NVFP4" in four
    bits; None for any other."""
    name, form = form_named(Path(path).name)
    if not (found := _published(name)):
        return None
    shape = ModelConfig.from_hf(KNOWN[found])
    return dataclasses.replace(shape, packed=Packed(form)) if form else shape


def shape_named(name: str) -> ModelConfig:
    """The shape of a published model by its name, in any case, with or without one of VARIANTS, and in four
    bits if a format follows, "Qwen3-8B-NVFP4". Raises ModelError, with the nearest name and the list of
    all."""
    if (found := known_shape(name)) is None:
        hint = nearest(name, KNOWN)
        listed = "name one of these" if "known" in hint else f"the shapes are {', '.join(KNOWN)}"
        raise ModelError(f"no published shape is named {name!r}{hint}", listed)
    return found


def _published(name: str) -> str | None:
    name = name.lower()
    return next((found for ending in ("", *VARIANTS) if (found := _BY_NAME.get(name.removesuffix(ending)))),
                None)


def awaited(path: str | Path) -> bool:
    """Whether a shipped config names this folder, and it is not there yet."""
    return Path(path).parent == PLACE and not Path(path).exists() and known_shape(path) is not None
