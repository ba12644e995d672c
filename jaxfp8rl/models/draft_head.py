"""The draft head: one layer that guesses the hidden state behind the next token, and so the token after it.

    hidden state at t - 1, which gave token t  -\\
                                                 norms, one product -> gated MLP -> final norm -> hidden state
    embedding of token t                       -/                                                 at t

It is the module of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2) without its attention:
what it knows of the earlier tokens is in the hidden state. So an engine keeps nothing of it between steps. It
shares the policy's embedding, final norm and output head. Fed with what it gave and the token that was drawn
from that, it guesses further ahead.

Letters: ... any leading axes, D width, F width of the MLP.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import Array

from jaxfp8rl.models import layers as nn
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.transformer import Params, final_norm
from jaxfp8rl.precision.records import Precision

STD = 0.02  # of the first weights


def head_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of a draft head's weights by name."""
    d, f = cfg.hidden_size, cfg.intermediate_size
    return {"hnorm": (d,), "enorm": (d,), "eh_proj": (d, 2 * d), "mlp_norm": (d,), "gate_proj": (f, d),
            "up_proj": (f, d), "down_proj": (d, f)}


def init_draft_head(cfg: ModelConfig, key: Array) -> Params:
    """Weights that guess nothing yet, {name: {"weight": float32}}: norms multiply by 1, products are drawn
    from N(0, STD), and the MLP adds 0."""
    shapes = head_shapes(cfg)
    keys = dict(zip(shapes, jax.random.split(key, len(shapes))))

    def first(name: str, shape: tuple[int, ...]) -> Array:
        if len(shape) == 1:
            return jnp.ones(shape)
        return jnp.zeros(shape) if name == "down_proj" else STD * jax.random.normal(keys[name], shape)

    return {name: {"weight": first(name, shape)} for name, shape in shapes.items()}


def guessed(head: Params, policy: Params, cfg: ModelConfig, precision: Precision, hidden: Array,
            tokens: Array) -> Array:
    """The guessed hidden states [..., D] after `tokens` [...] int32, each drawn from `hidden` [..., D]: both
    of them after the final norm, in `precision.compute_dtype`. head: of `init_draft_head`, of any float type.
    policy: its embedding and its final norm are used."""
    w = {name: node["weight"].astype(hidden.dtype) for name, node in head.items()}
    norm = functools.partial(nn.rms_norm, eps=cfg.rms_norm_eps)
    embedded = policy["embed_tokens"]["weight"][tokens].astype(hidden.dtype)
    x = jnp.concatenate([norm(hidden, w["hnorm"]), norm(embedded, w["enorm"])], -1) @ w["eh_proj"].T
    y = norm(x, w["mlp_norm"])
    x += (jax.nn.silu(y @ w["gate_proj"].T) * (y @ w["up_proj"].T)) @ w["down_proj"].T
    return final_norm(x, policy, cfg, precision).astype(hidden.dtype)
