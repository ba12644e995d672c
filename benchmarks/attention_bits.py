"""Bitwise agreement of packed attention with the engine's, FlashAttention 3: the share of outputs that differ
in bfloat16, against XLA's attention, and errors relative to float64.

    jaxfp8rl bench attention_bits

4,096 tokens in segments of several lengths (or of multiples of 8, so that every segment also begins at one);
8 query and 2 KV heads, or 2 of each, which take blocks of 128 queries; 4 and 2 for the shortest, as in
`tests/gpu/test_same_policy.py`. In FP8, q, k and v are E4M3 numbers.

Needs a Hopper GPU, and vLLM for FlashAttention 3.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import arguments, row, write
from jaxfp8rl.models import layers
from pallas_kernels.attention import api

TOKENS = 4096


class Case(NamedTuple):
    heads: int
    kv_heads: int
    d: int
    fp8: bool
    shortest: int  # segment
    longest: int
    multiple: int = 1  # lengths are multiples of it

    def __str__(self) -> str:
        lengths = f"{self.shortest} to {self.longest} tokens" + f", by {self.multiple}" * (self.multiple > 1)
        kind = "FP8" if self.fp8 else "bfloat16"
        return f"{kind}, {self.heads}/{self.kv_heads} heads of {self.d}, {lengths}"

    def lengths(self) -> list[int]:
        drawn = np.random.default_rng(0).integers(self.shortest, self.longest + 1,
                                                  TOKENS) // self.multiple * self.multiple
        ends = np.cumsum(drawn)
        return np.diff([0, *ends[ends < TOKENS], TOKENS]).tolist()


# beginning anywhere, where a thread's columns do, where a tensor-core step does
SHORT = (5, 10), (8, 8, 8), (16, 16, 16)
LENGTHS = (20, 64), (65, 128), (300, 1500), (300, 1500, 8), (TOKENS, TOKENS)
CASES = [
    Case(*shape, fp8, *lengths)
    for shape, fp8 in (((8, 2, 128), False), ((8, 2, 64), False), ((2, 2, 64), False), ((8, 2, 128), True))
    for lengths in LENGTHS
] + [Case(4, 2, 64, False, *lengths) for lengths in SHORT]


def main() -> None:
    args = arguments(__doc__, "attention_bits").parse_args()
    rows = []
    for case in CASES:
        rows += compare(case)
        write(args.out, "attention_bits", rows, args.plot)


def compare(case: Case) -> list[dict]:
    lengths, q, k, v = case.lengths(), *draw(case)
    ids = jnp.asarray(np.repeat(np.arange(len(lengths)) + 1, lengths), jnp.int32)
    ours, xla, engine = kernel(case.fp8, q, k, v,
                               ids), by_xla(case.fp8, q, k, v, ids), flash_attention(case, q, k, v, lengths)
    with jax.enable_x64(True):
        exact = np.asarray(float64(*(jnp.asarray(np.asarray(x, np.float64)) for x in (q, k, v)), ids))
    ours, xla, engine = (np.asarray(x, np.float64) for x in (ours, xla, engine))
    unlike = lambda x: float((x != engine).mean())
    error = lambda x: float(np.linalg.norm(x - exact) / np.linalg.norm(exact))
    return [
        row(str(case), "outputs unlike FlashAttention 3's", "share", unlike(ours), unlike(xla), "XLA",
        smaller_is_better=True),
        row(str(case), "error to float64", "of norm", error(ours), error(engine), "FlashAttention 3",
            smaller_is_better=True),
    ]


@functools.partial(jax.jit, static_argnums=0)
def draw(case: Case) -> list[jax.Array]:
    """Queries twice as large as keys, so that the keys have different weights."""
    keys, heads = jax.random.split(jax.random.key(0), 3), (case.heads, case.kv_heads, case.kv_heads)
    drawn = [jax.random.normal(key, (TOKENS, h, case.d)) * size
             for key, h, size in zip(keys, heads, (2, 1, 1))]
    return [(layers.round_e4m3(x) if case.fp8 else x).astype(jnp.bfloat16) for x in drawn]


@functools.partial(jax.jit, static_argnums=0)
def kernel(fp8: bool, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    return api.attention(q, k, v, ids, fp8=fp8, backend="pallas")


@functools.partial(jax.jit, static_argnums=0)
def by_xla(fp8: bool, q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    return layers.attention(q[None], k[None], v[None], layers.attention_mask(ids[None]), fp8)[0]


float64 = jax.jit(functools.partial(api.attention, backend="reference"))


def flash_attention(case: Case, q: jax.Array, k: jax.Array, v: jax.Array, lengths: list[int]) -> np.ndarray:
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    jax.block_until_ready((q, k, v))
    ends, longest = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device="cuda"), max(lengths)
    qkv, scales = [torch.from_dlpack(x) for x in (q, k, v)], {}
    if case.fp8:
        one = torch.ones((len(lengths), case.kv_heads), dtype=torch.float32, device="cuda")
        qkv, scales = [x.to(torch.float8_e4m3fn)
                       for x in qkv], dict(q_descale=one, k_descale=one, v_descale=one)
    o = flash_attn_varlen_func(
        *qkv, max_seqlen_q=longest, cu_seqlens_q=ends, max_seqlen_k=longest, cu_seqlens_k=ends, causal=True,
        fa_version=3, **scales,
    )
    return o.float().cpu().numpy()


if __name__ == "__main__":
    main()
