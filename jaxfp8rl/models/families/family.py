"""The declaration of a family of decoders: everything that differs between them, as data.

The forward pass (`models/decoder_layer.py`), the parameter table (`models/hf_names.py`), the config reader
(`models/config.py`) and all that walks them (loading, saving, publishing, sharding, memory plan, FLOPs) read
it. docs/models.md shows how to add a family.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

FULL, SLIDING = "full_attention", "sliding_attention"  # the values of `layer_types`


class Activation(enum.StrEnum):
    """The activation of the gated MLP, down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclasses.dataclass(frozen=True)
class Norms:
    """Where the RMSNorms of a layer stand, by their Hugging Face names.

    before_attention, before_mlp: the norms of a sublayer's input.
    after_attention, after_mlp: the norms of its output, before the residual sum. None: there is none.
    """

    before_attention: str = "input_layernorm"
    before_mlp: str = "post_attention_layernorm"
    after_attention: str | None = None
    after_mlp: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, in the order of the forward pass."""
        every = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in every if name)


PRE_NORM = Norms()
SANDWICH = Norms("input_layernorm", "pre_feedforward_layernorm", "post_attention_layernorm",
                 "post_feedforward_layernorm")


@dataclasses.dataclass(frozen=True)
class Family:
    """One family. The defaults are Llama's.

    architecture, model_type: as in config.json.
    publisher: (how the names of its models begin, who publishes them), for the command that downloads one.

    The arithmetic:
    qkv_bias: q_proj, k_proj and v_proj add a bias.
    qk_norm: each query and key head is normalised before RoPE.
    norms: where the norms of a layer stand.
    unit_offset: norms multiply by 1 + weight, in float32, and round once.
    activation: of the gated MLP.
    scaled_embedding: embeddings are multiplied by the square root of the width, rounded to the compute type.
    logit_softcap: the logits of tokens are soft-capped where config.json has `final_logit_softcapping`.
    experts: some layers have a mixture of experts for an MLP.
    sliding_window: layers may see a window: all that `layer_types` calls so, or all layers without it.
    rope_theta: the RoPE base where config.json has none.
    local_rope_theta: the RoPE base of layers with a window, likewise, and without scaling. None: they rotate
        as the others do.

    config.json:
    defaults: keys that may be absent, with the values that transformers gives them. A function computes a
        value from the other keys.
    only: keys that would change the arithmetic, with the values that are implemented, besides those of
        `models/config.py`.
    activation_key: the key that names the activation.
    """

    architecture: str
    model_type: str
    publisher: tuple[str, str] | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    norms: Norms = PRE_NORM
    unit_offset: bool = False
    activation: Activation = Activation.SILU
    scaled_embedding: bool = False
    logit_softcap: bool = False
    experts: bool = False
    sliding_window: bool = False
    rope_theta: float = 10000.0
    local_rope_theta: float | None = None
    defaults: Mapping[str, Any | Callable[[Mapping[str, Any]], Any]] = dataclasses.field(default_factory=dict)
    only: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
    activation_key: str = "hidden_act"

    def default(self, raw: Mapping[str, Any], key: str) -> Any:
        """The value of a key of config.json, or the family's default; None without either. A null stands
        for a computed default."""
        value = self.defaults.get(key)
        if callable(value):
            return value(raw) if raw.get(key) is None else raw[key]
        return raw.get(key, value)


def head_dim_of_width(raw: Mapping[str, Any]) -> int | None:
    """hidden_size / num_attention_heads, for families whose config.json may leave `head_dim` out."""
    width, heads = raw.get("hidden_size"), raw.get("num_attention_heads")
    return width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else None


def query_heads(raw: Mapping[str, Any]) -> Any:
    """As many key-value heads as query heads, where `num_key_value_heads` is absent."""
    return raw.get("num_attention_heads")
