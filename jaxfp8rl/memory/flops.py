"""The floating-point operations of an update, and the utilisation that they amount to."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from jaxfp8rl.data.packing import Sample
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import linear_shapes

# dense BF16 operations per second, from the data sheets
PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12}


def update_flops(model: ModelConfig, samples: Sequence[Sample]) -> float:
    """The operations of the forward and backward pass over `samples`.

    A parameter takes 2 operations per token forward and 4 backward; the head's parameters count for response
    tokens only. Attention takes 4 H d for each pair of a query and a key that it attends to, and 2.5 times
    that backward, as in FlashAttention-2 (Dao, 2023, section 4.1). Recomputation to save memory does not
    count, and neither do tokens that lie in the row already (Sample.shared).
    """
    lengths = [(len(s.prompt) + len(s.completion), s.shared) for s in samples]
    linears = sum(n * k * _uses(model, module) for module, (n, k) in linear_shapes(model).items())
    seen = sum(_pairs(n, kind.window) - _pairs(shared, kind.window) for kind in model.layer_kinds
               for n, shared in lengths)
    attention = 3.5 * 4 * seen * model.num_attention_heads * model.head_dim
    head = model.vocab_size * model.hidden_size * sum(len(s.completion) for s in samples)
    return 6 * (linears * sum(n - shared for n, shared in lengths) + head) + attention


def _pairs(length: int, window: int | None) -> float:
    """The pairs of a query and a key that it sees. A query sees at most `window` keys, its own included."""
    beyond = max(length - window, 0) if window else 0
    return (length * (length + 1) - beyond * (beyond + 1)) / 2


def _uses(model: ModelConfig, module: str) -> int:
    """How many products with this module's weight a token goes through: one for each layer that has the
    module, or one for each expert that the token is routed to."""
    if module.startswith("mlp.experts."):
        return sum(model.sparse_layers) * model.mixture.num_experts_per_tok
    return model.sparse_layers.count(False) if module.startswith("mlp.") else model.num_hidden_layers


def mfu(flops: float, seconds: float, devices: int = 1) -> float | None:
    """Model FLOPs utilisation (PaLM, Chowdhery et al., 2022, appendix B). The peak is that of BF16, whatever
    the precision; None on a device whose peak is not known here."""
    peak = PEAK.get(jax.local_devices()[0].device_kind)
    return peak and flops / seconds / peak / devices
