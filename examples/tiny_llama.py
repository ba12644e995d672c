"""Somebody else's model: a small Llama in plain JAX, with its layers stacked for `lax.scan` and its kernels
[in, ..., out]. `jax_learner_on_vllm.py` trains it."""

import jax
import jax.numpy as jnp

V, D, H, K, F, L = 40, 64, 2, 32, 96, 2  # vocabulary, width, heads, width of a head, hidden, layers
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V, "hidden_size": D,
    "num_attention_heads": H, "num_key_value_heads": H, "head_dim": K, "intermediate_size": F,
    "num_hidden_layers": L, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": True,
}
KERNELS = {"q": (D, H, K), "k": (D, H, K), "v": (D, H, K), "o": (H, K, D), "gate": (D, F), "up": (D, F),
           "down": (F, D)}


def init(key):
    embed, *keys = jax.random.split(key, 1 + len(KERNELS))
    kernels = {name: jax.random.normal(k, (L, *shape)) / 8 for k, (name, shape) in zip(keys, KERNELS.items())}
    norms = {"norm_1": jnp.ones((L, D)), "norm_2": jnp.ones((L, D))}
    return {"embed": jax.random.normal(embed, (V, D)) / 8, "layers": kernels | norms, "norm": jnp.ones(D)}


def hidden(params, tokens):
    """tokens [B, T] -> [B, T, D]; the head is the embedding."""
    x, _ = jax.lax.scan(layer, params["embed"][tokens], params["layers"])
    return norm(x, params["norm"])


def layer(x, w):
    h = norm(x, w["norm_1"])
    q, k, v = (jnp.einsum("btd,dhk->bthk", h, w[name]) for name in "qkv")
    attended = jax.nn.dot_product_attention(rope(q), rope(k), v, is_causal=True)
    x = x + jnp.einsum("bthk,hkd->btd", attended, w["o"])
    h = norm(x, w["norm_2"])
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def rope(x):
    """x [B, T, H, K]."""
    angle = jnp.arange(x.shape[1])[:, None, None] * 1e4 ** (-jnp.arange(0, K, 2) / K)
    (a, b), cos, sin = jnp.split(x, 2, -1), jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
