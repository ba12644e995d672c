"""The learner's attention rounds where vLLM's FlashAttention 3 does: bit for bit but for its own exp2 near a
tie."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from jaxfp8rl.models.layers import attention, round_e4m3
from jaxfp8rl.precision.jit import rounding_exact_jit

B, T, H, K, D, PAGE = 16, 48, 4, 2, 64, 16


@pytest.fixture(scope="module")
def qkv() -> tuple[jax.Array, ...]:
    """bfloat16 [B, T, H or K, D], sharp enough that the probabilities differ."""
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(2 * jax.random.normal(key, (B, T, heads, D), jnp.bfloat16)
                 for key, heads in zip(keys, (H, K, K)))


def flash(q, k, v, fp8: bool) -> np.ndarray:
    """vLLM's kernel over a paged cache, causal; with `fp8`, on E4M3 queries, keys and values of scale 1."""
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    to = torch.float8_e4m3fn if fp8 else torch.bfloat16
    q, k, v = (torch.from_numpy(np.asarray(a, np.float32)).cuda().to(to) for a in (q, k, v))
    lengths = torch.full((B,), T, dtype=torch.int32, device="cuda")
    out = torch.empty((B * T, H, D), dtype=torch.bfloat16, device="cuda")
    one = torch.ones((B, K), device="cuda")
    flash_attn_varlen_func(
        q.reshape(-1, H, D), k.reshape(-1, PAGE, K, D), v.reshape(-1, PAGE, K, D), max_seqlen_q=T,
        max_seqlen_k=T,
        cu_seqlens_q=torch.arange(0, B * T + 1, T, dtype=torch.int32, device="cuda"), seqused_k=lengths,
        causal=True,
        block_table=torch.arange(B * T // PAGE, dtype=torch.int32, device="cuda").reshape(B, -1), out=out,
        fa_version=3,
        softmax_scale=D**-0.5, **({"q_descale": one, "k_descale": one, "v_descale": one} if fp8 else {}),
    )
    return out.float().cpu().numpy().reshape(B, T, H, D)


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bfloat16"])
def test_attention_is_flash_attention_3(fp8, qkv):
    q, k, v = qkv
    k, v = (round_e4m3(k), round_e4m3(v)) if fp8 else (k, v)
    mask = jnp.tril(jnp.ones((B, T, T), bool))
    want = flash(q, k, v, fp8)
    mirrored, other = (
        np.asarray(rounding_exact_jit(attention, static_argnums=4)(q, k, v, mask, flag), np.float32)
        for flag in (fp8, not fp8)
    )
    assert (mirrored == want).mean() > 0.9 and (other == want).mean() < 0.7
