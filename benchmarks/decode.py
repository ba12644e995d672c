"""Paged decode attention against a copy, FlashAttention 3 and JAX's Triton kernel, in one process on one GPU.

    jaxfp8rl bench decode [--tune]

One query per sequence; 32 query heads and 8 KV heads of 128, or Gemma 3 1B's 4 and 1 of 256; pages lie in
shuffled order. GB/s count the visible keys and values once; the tables made from the lengths on the device
are included in our time. The yardsticks are a copy that reads and writes as many bytes in total (torch's, or
XLA's if torch is missing), FlashAttention 3 through vLLM with the same cache (with an E4M3 cache its queries
and exponentials are E4M3 as well), and `jax.experimental.pallas.ops.gpu.paged_attention` in bfloat16. Every
round times all programs in rotating order; results are medians. --tune times our kernel with every entry of
TUNE against the copy, and writes nothing.

Needs a Hopper GPU; vLLM for FlashAttention 3.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention import compiled
from benchmarks.common import arguments, row, write
from benchmarks.grouped import available, measure
from pallas_kernels.decode_attention import api

PAGE = 64
SPREAD = 1.0  # the standard deviation of log length
E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16
Runs = dict[str, Callable[[int], object]]
TUNE = {
    "a head a turn": api.Tiles(turn=1), "four heads a turn": api.Tiles(turn=4),
    "4 slots": api.Tiles(slots=4), "6 slots": api.Tiles(slots=6),
}


class Case(NamedTuple):
    """Sequences of these lengths; the dtype and page size of the cache; the numbers of query and KV heads,
    their size, and the window."""

    name: str
    lengths: tuple[int, ...]
    dtype: type = E4M3
    page: int = PAGE
    heads: tuple[int, int] = (32, 8)
    d: int = 128
    window: int | None = None

    @property
    def bytes(self) -> int:
        seen = sum(min(n, self.window or n) for n in self.lengths)
        return 2 * self.heads[1] * self.d * seen * jnp.dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.name}, {jnp.dtype(self.dtype).name}, pages of {self.page}"


class Operands(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    table: jax.Array
    lengths: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None


def uneven(batch: int, mean: int) -> tuple[int, ...]:
    share = np.random.default_rng(0).lognormal(0, SPREAD, batch)
    return tuple(np.maximum(share / share.mean() * mean, 1).astype(int).tolist())


CASES = [
    Case("128 x 8192", (8192,) * 128), Case("128, uneven", uneven(128, 8192)),
    Case("8 x 32768", (32768,) * 8),
    Case("128 x 1024", (1024,) * 128), Case("64 x 8192", (8192,) * 64, BF16),
    Case("128 x 8192", (8192,) * 128, page=16),
    Case("128 x 8192, window 512", (8192,) * 128, BF16, window=512),
    *(Case(f"128 x 8192, heads of 256{name}", (8192,) * 128, dtype, PAGE, (4, 1), 256, window)
      for dtype in (E4M3, BF16) for name, window in (("", None), (", window 512", 512))),
]


def main() -> None:
    parser = arguments(__doc__, "decode")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="+", type=int, default=range(len(CASES)),
                        help="cases by number, from 0")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    rows = []
    for case in [CASES[i] for i in args.only]:
        speed = time_case(case, args.tune, args.rounds)
        print(f"{case}:", *(f"| {name} {value:.0f}" for name, value in speed.items()), flush=True)
        if not args.tune:
            own = speed.pop("ours")
            rows += [row(str(case), "keys and values read", "GB/s", own, value, name)
                     for name, value in speed.items()]
            write(args.out, "decode", rows, args.plot, uneven=CASES[1].lengths)


def time_case(case: Case, tune: bool, rounds: int) -> dict[str, float]:
    """GB/s by name."""
    operands = draw(case)
    makes = {name: lambda run=run: run
             for name, run in ours(case, operands, tune).items()} | {"copy": lambda: copy(case.bytes)}
    if not tune:
        makes |= {"FlashAttention 3": lambda: flash_attention(case, operands)}
        makes |= {"JAX Triton": lambda: triton(case, operands)}
    runs = available(makes)
    if "FlashAttention 3" in runs and "ours" in runs:
        got, want = np.asarray(runs["ours"](0), np.float32), runs["FlashAttention 3"](0).float().cpu().numpy()
        print(
            f"{case}: ours and FlashAttention 3 differ by "
            f"{np.linalg.norm(got - want) / np.linalg.norm(want):.1e}",
            flush=True,
        )
    return {name: case.bytes / time / 1e9 for name, time in measure(runs, rounds).items()}


def draw(case: Case) -> Operands:
    """Operands with a shuffled block table, so that consecutive pages of a sequence are not neighbours in
    memory."""
    counts = [-(-n // case.page) for n in case.lengths]
    order, table = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32), []
    for b, count in enumerate(counts):
        table.append(np.pad(order[sum(counts[:b]) :][:count], (0, max(counts) - count)))
    keys, (H, K) = jax.random.split(jax.random.key(0), 3), case.heads
    normal = jax.jit(lambda key: jax.random.normal(key, (sum(counts), case.page, K, case.d),
                                                   BF16).astype(case.dtype))
    q = jax.random.normal(keys[0], (len(counts), H, case.d), BF16)
    scales = [jnp.ones(K) if case.dtype == E4M3 else None] * 2
    return Operands(q, *map(normal, keys[1:]), jnp.asarray(np.stack(table)),
                    jnp.asarray(case.lengths, jnp.int32), *scales)


def ours(case: Case, operands: Operands, tune: bool) -> Runs:
    choices = TUNE if tune else {}
    attend = functools.partial(api.decode_attention, backend="pallas", window=case.window)
    programs = {name: jax.jit(functools.partial(attend, tiles=t))
                for name, t in {"ours": None, **choices}.items()}
    return compiled({name: (f, tuple(operands)) for name, f in programs.items()})


def copy(count: int) -> Callable[[int], object]:
    """A copy of half as many bytes, so that reads and writes add up to `count`."""
    try:
        import torch
    except ImportError:
        source, f = jnp.ones(count // 8, jnp.float32), jax.jit(lambda x: -x)
        return lambda i: f(source)
    source, target = (torch.ones(count // 8, dtype=torch.float32, device="cuda") for _ in range(2))
    return lambda i: target.copy_(source)


def flash_attention(case: Case, operands: Operands) -> Callable[[int], object]:
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    q, k, v, table, lengths = (torch.from_dlpack(x) for x in fa3_operands(operands))
    starts = torch.arange(len(q) + 1, dtype=torch.int32, device="cuda")
    out = torch.empty(q.shape, dtype=torch.bfloat16, device="cuda")
    options = {} if case.window is None else {"window_size": (case.window - 1, 0)}
    if case.dtype == E4M3:
        q, k, v = (x.view(torch.float8_e4m3fn) for x in (q, k, v))
        one = torch.ones(len(q), case.heads[1], device="cuda")
        options |= dict(q_descale=one, k_descale=one, v_descale=one)

    def run(i: int):
        return flash_attn_varlen_func(
            q, k, v, max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=max(case.lengths), seqused_k=lengths,
            block_table=table, causal=True, fa_version=3, out=out, **options,
        )

    return run


def fa3_operands(o: Operands) -> tuple[jax.Array, ...]:
    """The operands for torch, with E4M3 as bytes, which every version of DLPack supports."""
    cast = lambda x: jax.lax.bitcast_convert_type(x.astype(E4M3), jnp.uint8)  # noqa: E731
    q, k, v = map(cast, (o.q, o.k, o.v)) if o.k.dtype == E4M3 else (o.q, o.k, o.v)
    return q, k, v, o.table, o.lengths


def triton(case: Case, o: Operands) -> Callable[[int], object]:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    if o.k.dtype == E4M3 or case.window:
        raise NotImplementedError("it has neither an E4M3 cache nor windows")
    k, v = (x.transpose(2, 0, 1, 3) for x in (o.k, o.v))
    attend = functools.partial(paged_attention, pages_per_compute_block=max(1, 64 // k.shape[2]))
    return compiled({"": (jax.jit(attend), (o.q, k, v, o.table, o.lengths))})[""]


if __name__ == "__main__":
    main()
