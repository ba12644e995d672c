"""Packed causal attention against cuDNN and FlashAttention 3, forward and backward, in one process on one
GPU.

    jaxfp8rl bench attention [--tune]

32 query heads and 8 KV heads of 128, or 8 and 4 of 256, bfloat16. TFLOP/s count the necessary operations: 4 d
H for each pair of a query and a key that it sees, and 2.5 times that backward. The tables made from the
segment ids, once for all layers of a model, are timed separately, as FlashAttention gets cumulative lengths.
The yardsticks are FlashAttention 3 over variable lengths, forward and backward, and cuDNN through
`jax.nn.dot_product_attention`. cuDNN runs over the whole row, with a mask for packed rows (of up to MASK
elements) and without (causal over the whole row: less work than with a mask, and a different result). Lengths
of packed rows are log-normal. Every round times all programs in rotating order; results are medians. The last
rows are the geometric means of the ratios to FlashAttention 3, beside the bars BARS. --tune times the other
choices of tiles.

Needs a Hopper GPU; dew-flash-attn-cu13 for FlashAttention 3.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import arguments, row, write
from benchmarks.grouped import available, measure
from pallas_kernels.attention import api, sm90_dq, sm90_forward
from pallas_kernels.attention.segments import tables_of

LONGEST, SPREAD = 16_384, 1.5  # the longest packed segment; the standard deviation of log length
MASK = 2**29  # elements
FLASH = "FlashAttention 3"
BARS = {"forward": 0.95, "backward": 0.85}  # of FlashAttention 3's speed, in the geometric mean of the cases
Runs = dict[str, Callable[[int], object]]


class Case(NamedTuple):
    """B rows of T tokens, each packed with segments of these lengths; the numbers of query and KV heads, and
    their size."""

    name: str
    rows: int
    lengths: tuple[int, ...]
    window: int | None = None
    heads: tuple[int, int] = (32, 8)
    d: int = 128

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def flops(self) -> float:
        """Operations of the forward pass."""
        w = self.window or self.tokens
        pairs = (min(n, w) * (min(n, w) + 1) / 2 + max(n - w, 0) * w for n in self.lengths)
        return 4.0 * self.d * self.heads[0] * self.rows * sum(pairs)

    def ids(self) -> jax.Array:
        row = np.repeat(np.arange(len(self.lengths)), self.lengths) + 1
        return jnp.asarray(np.tile(row, (self.rows, 1)), jnp.int32)


def packed(tokens: int, segments: int) -> Case:
    share = np.random.default_rng(0).lognormal(0, SPREAD, segments)
    lengths = np.minimum(1 + (share / share.sum() * (tokens - segments)).astype(int), LONGEST)
    lengths[np.argmin(lengths)] += tokens - lengths.sum()
    return Case(f"packed {tokens}, {segments} segments", 1, tuple(lengths.tolist()))


CASES = [
    Case("causal 4 x 4096", 4, (4096,)), Case("causal 1 x 16384", 1, (16384,)),
    packed(16384, 8), packed(16384, 64), packed(65536, 32), packed(65536, 256),
    Case("window 1024, causal 1 x 16384", 1, (16384,), 1024),
    Case("heads of 256, causal 4 x 4096", 4, (4096,), None, (8, 4), 256),
    Case("heads of 256, window 1024, causal 1 x 16384", 1, (16384,), 1024, (8, 4), 256),
]


def main() -> None:
    parser = arguments(__doc__, "attention")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", type=int, default=range(len(CASES)),
                        help="cases by number, from 0")
    parser.add_argument("--tune", action="store_true")
    args = parser.parse_args()
    rows = []
    for case in [CASES[i] for i in args.only]:
        for passed, flops, runs in passes(case, args.tune):
            seconds = measure(runs, args.rounds)
            speed = {name: flops / time / 1e12 for name, time in seconds.items() if name != "tables"}
            print(f"{case.name}, {passed}:", *(f"| {name} {value:.0f}" for name, value in speed.items()),
                  flush=True)
            own = speed.pop("ours")
            rows += [row(case.name, passed, "TFLOP/s", own, value, name) for name, value in speed.items()]
            if "tables" in seconds:
                us = {name: 1e6 * seconds[name] for name in ("tables", "ours")}
                rows.append(row(case.name, "tables", "us", us["tables"], us["ours"], "our forward",
                                smaller_is_better=True))
        means = list(geometric_means(rows))
        write(args.out, "attention", rows + means, args.plot, lengths={c.name: c.lengths for c in CASES})


def geometric_means(rows: list[dict]) -> Iterator[dict]:
    """A row for each direction: the geometric mean of the ratios to FlashAttention 3, beside its bar."""
    for passed, bar in BARS.items():
        ratios = [r["ratio"] for r in rows if r["yardstick_name"] == FLASH and r["metric"] == passed]
        if ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            yield row(f"geometric mean of {len(ratios)} cases", f"{passed} over {FLASH}", "ratio", mean, bar,
                      "the bar")


def passes(case: Case, tune: bool):
    """(name, operations, runs) of the forward and the backward pass."""
    *qkv, do = draw(case)
    forward, backward = ours(case, qkv, do, tune)
    theirs = cudnn(case, qkv, do) | available({FLASH: lambda: (True, *flash_attention(case, qkv, do))})
    for name, (same, run, pull) in theirs.items():
        if same:
            check(f"{case.name}: ours and {name}", forward["ours"](0), run(0), 6e-3)
            check(f"{case.name}, dq: ours and {name}", backward["ours"](0), pull(0), 1e-2)
    yield "forward", case.flops, forward | {name: run for name, (_, run, _) in theirs.items()}
    yield "backward", 2.5 * case.flops, backward | {name: run for name, (_, _, run) in theirs.items()}


@functools.partial(jax.jit, static_argnums=0)
def draw(case: Case) -> tuple[jax.Array, ...]:
    """q, k, v, do."""
    keys = jax.random.split(jax.random.key(0), 4)
    shape, (H, K) = lambda heads: (case.rows, case.tokens, heads, case.d), case.heads
    return tuple(jax.random.normal(key, shape(h), jnp.bfloat16) for key, h in zip(keys, (H, K, K, H)))


def ours(case: Case, qkv: list, do: jax.Array, tune: bool) -> tuple[Runs, Runs]:
    """The forward pass and the tables; the backward pass from the forward pass's residuals."""
    of_forward, of_backward = {"ours": api.TILES}, {"ours": api.TILES}
    if tune:
        one_head = lambda kernel: kernel.TILES[case.d]._replace(heads=1)
        of_forward["a head by 128 queries"] = api.Tiles(forward=one_head(sm90_forward))
        of_backward["dq of a head by 128 queries"] = api.Tiles(dq=one_head(sm90_dq))
    ids, scale, make_tables = case.ids(), case.d**-0.5, functools.partial(tables_of, window=case.window)
    flat, tables = [x.reshape(-1, *x.shape[2:]) for x in qkv], jax.jit(make_tables)(ids)
    (o, lse), saved = jax.jit(functools.partial(api.forward, api.How(scale)))(*flat, tables)
    cotangents = do.reshape(o.shape), jnp.zeros_like(lse)
    attend = functools.partial(api.attention, backend="pallas")
    pull = lambda t: jax.jit(functools.partial(api.backward, api.How(scale, tiles=t)))  # noqa: E731
    programs = {f"f {n}": (jax.jit(functools.partial(attend, tiles=t)), (*qkv, tables))
                for n, t in of_forward.items()}
    programs |= {f"b {n}": (pull(t), (saved, cotangents)) for n, t in of_backward.items()}
    runs = compiled(programs | {"f tables": (jax.jit(make_tables), (ids,))})
    return tuple({name[2:]: run for name, run in runs.items() if name[0] == which} for which in "fb")


def compiled(programs: dict[str, tuple]) -> Runs:
    """The compiled programs by name: each runs and returns its first result."""
    with ThreadPoolExecutor() as pool:
        made = pool.map(lambda program: program[0].lower(*program[1]).compile(), programs.values())
        first = lambda f, args: lambda i: jax.tree.leaves(f(*args))[0]  # noqa: E731
        return {name: first(f, args) for (name, (_, args)), f in zip(programs.items(), made)}


def cudnn(case: Case, qkv: list, do: jax.Array) -> dict[str, tuple]:
    """(whether it computes the requested result, forward, backward) of attention over the row: causal, and
    masked if the row has segments."""
    single, name = len(case.lengths) == 1, "cuDNN" if len(case.lengths) == 1 else "cuDNN, causal over the row"
    window = {} if case.window is None else {"local_window_size": (case.window - 1, 0)}
    made = {name: lambda: (single, *_cudnn(qkv, do, is_causal=True, **window))}
    if not single and case.tokens**2 <= MASK:
        ids, at = case.ids()[0], jnp.arange(case.tokens)
        mask = ((ids[:, None] == ids) & (at <= at[:, None]))[None, None]
        made["cuDNN with a mask"] = lambda: (True, *_cudnn(qkv, do, mask=mask))
    return available(made)


def _cudnn(qkv: list, do: jax.Array, **options) -> tuple[Callable[[int], object], ...]:
    attend = jax.jit(functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **options))
    return _both_ways(attend, *qkv, do)


def _both_ways(attend: Callable, *operands: jax.Array) -> tuple[Callable[[int], object], ...]:
    """(forward, backward from the forward pass's residuals) of attend(q, k, v), the cotangent last."""
    *qkv, do = operands
    pull = jax.vjp(attend, *qkv)[1]
    runs = compiled({"forward": (attend, tuple(qkv)),
                     "backward": (jax.jit(lambda pull, do: pull(do)), (pull, do))})
    return runs["forward"], runs["backward"]


def check(what: str, got: jax.Array, want: jax.Array, limit: float) -> None:
    got, want = got.astype(jnp.float32).reshape(want.shape), want.astype(jnp.float32)
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    if not error < limit:
        raise SystemExit(f"{what} differ by {error:.2e}")


def flash_attention(case: Case, qkv: list, do: jax.Array) -> tuple[Callable[[int], object], ...]:
    """(forward, backward) of FlashAttention 3 over the segments."""
    from dew_flash_attn import flash_mha_varlen

    ends = np.concatenate([[0], np.cumsum(np.tile(case.lengths, case.rows))]).astype(np.int32)
    window = (-1, -1) if case.window is None else (case.window - 1, 0)
    attend = jax.jit(functools.partial(
        flash_mha_varlen, cu_seqlens=ends, max_seqlen=max(case.lengths), is_causal=True, window_size=window))
    return _both_ways(attend, *(x.reshape(-1, *x.shape[2:]) for x in (*qkv, do)))


if __name__ == "__main__":
    main()
