"""Rows that hold a shared prefix once, against the same sequences in plain rows: attention and a decoder
layer of Qwen3-8B, forward and backward, at packing ratios 1 to 8, on one GPU.

    jaxfp8rl bench tree [--tokens 8192] [--ratios 1 1.5 2 4 8] [--completions 16] [--lowered FOLDER]

A group of completions of one prompt, of equal lengths. The tree is one row of `tokens` tokens; unshared, its
sequences have `ratio` times as many, and a prompt that is longer the higher the ratio. At ratio 1 nothing is
shared: what a tree costs by itself. The layer is computed in bfloat16 and in FP8 (fp8_unified), with
gradients of its input and of all weights. Before anything is timed, the attention of both is compared: shared
tokens to the bit, the others to bfloat16's roundings. Rounds rotate the order; results are medians.

JAX lowers a program with kernels in Python, which takes minutes for all of these. `python benchmarks/tree.py
--lower FOLDER` lowers them for a GPU on a machine that has none, times nothing and ends. `--lowered FOLDER`
reads them, made of the same code.

Needs a Hopper GPU; none with --lower.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, export

from benchmarks.common import arguments, row, write
from benchmarks.grouped import measure
from benchmarks.layer import MODEL, RECIPES, draw
from benchmarks.step import precision_of
from jaxfp8rl.data.trees import ends_of
from jaxfp8rl.models.decoder_layer import DecoderLayer
from jaxfp8rl.models.layers import UnfusedResidual
from jaxfp8rl.models.transformer import packed_attention
from jaxfp8rl.precision.jit import rounding_exact_jit
from jaxfp8rl.precision.records import Precision
from jaxfp8rl.precision.weights import trainable
from jaxfp8rl.training.ahead import UNPROMISED, code
from pallas_kernels.attention import api
from pallas_kernels.numerics import relative_l2

export.register_namedtuple_serialization(UnfusedResidual, serialized_name="benchmarks.UnfusedResidual")
CHUNK = 128  # the length of a row is a multiple of it


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of sequences (length, shared), padded. ids, positions, ends: [1, T] int32."""

    members: tuple[tuple[int, int], ...]

    def arrays(self, tree: bool) -> tuple[Array, Array, Array | None]:
        """(ids, positions, ends or None)."""
        own = [n - shared for n, shared in self.members]
        pad = (0, -sum(own) % CHUNK)
        ids = np.repeat(np.arange(len(own)) + 1, own)
        positions = np.concatenate([np.arange(shared, n) for n, shared in self.members])
        found = [ids, positions, *([ends_of(self.members)] if tree else [])]
        ids, positions, *ends = (jnp.asarray(np.pad(x, pad), jnp.int32)[None] for x in found)
        return ids, positions, ends[0] if tree else None


def rows_of(tokens: int, ratio: float, n: int) -> tuple[Row, Row]:
    """(the tree, the plain row) of n sequences: a prompt of P tokens, of which P - 1 are shared, and
    completions of C each: P + n C tokens in the tree, and n (P + C), `ratio` times as many, in the plain
    row."""
    if ratio == 1:
        return (Row(((tokens // n, 0),) * n),) * 2
    prompt = int(tokens * (ratio - 1) / (n - 1))
    length, shared = prompt + (tokens - prompt) // n, prompt - 1
    return Row(((length, 0), *((length, shared),) * (n - 1))), Row(((length, 0),) * n)


class Programs:
    """Programs, each lowered once for all ratios that call it.

    lowered: a folder of programs that `lower` left, or None. The files are named by a hash of the code.
    """

    def __init__(self, lowered: Path | None = None):
        self._lowered, self._compiled, self._pool = lowered, dict[str, Future](), ThreadPoolExecutor()

    def start(self, name: str, jit: Callable, f: Callable, args: tuple) -> Callable[[], Callable]:
        """Compile jit(f) for `args` in a thread. Returns what waits for it. Raises SystemExit if the folder
        lacks it."""
        if name not in self._compiled:
            jitted = jit(read(self._lowered, name) if self._lowered else f)
            self._compiled[name] = self._pool.submit(jitted.lower(*args).compile)
        return self._compiled[name].result


class Lowering(Programs):
    """It writes programs into a folder in place of compiling them."""

    def __init__(self, folder: Path):
        self._folder = folder

    def start(self, name: str, jit: Callable, f: Callable, args: tuple) -> Callable[[], Callable]:
        path = file_of(self._folder, name)
        if not path.exists():
            print(f"lowering {name}", flush=True)
            program = export.export(jit(f), platforms=["cuda"], disabled_checks=UNPROMISED)(*args)
            path.write_bytes(program.serialize())
        return lambda: f


def read(folder: Path, name: str) -> Callable:
    path = file_of(folder, name)
    if not path.exists():
        sys.exit(f"{path} does not exist: `python benchmarks/tree.py --lower {folder}` makes it, "
                 "of the same code")
    program = export.deserialize(bytearray(path.read_bytes()))
    return lambda *args: program.call(*args)


def file_of(folder: Path, name: str) -> Path:
    return folder / f"{code()[:12]}-{name.replace(' ', '-')}"


def main() -> None:
    parser = arguments(__doc__, "tree")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ratios", type=float, nargs="+", default=[1, 1.5, 2, 4, 8])
    parser.add_argument("--completions", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lower", type=Path, metavar="FOLDER")
    parser.add_argument("--lowered", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    pairs = {ratio: rows_of(args.tokens - args.completions, ratio, args.completions)  # and the copies
             for ratio in args.ratios}
    if args.lower:
        args.lower.mkdir(parents=True, exist_ok=True)
        for tree, plain in pairs.values():
            started(Lowering(args.lower), tree, plain)
        return
    rows, checked, programs = [], {}, Programs(args.lowered)
    for ratio, (tree, plain) in pairs.items():
        runs = started(programs, tree, plain)
        checked[str(ratio)] = check(programs, tree, plain)
        for what, all_of_it in runs.items():
            timed = {key: run() for key, run in all_of_it.items()}
            ms = {key: 1e3 * time for key, time in measure(timed, args.rounds).items()}
            rows += [row(f"ratio {ratio:g}, {what}", passed, "ms", ms["tree", passed], ms["plain", passed],
                         "the same sequences in plain rows", True) for passed in PASSES]
            write(args.out, "tree", rows, args.plot, tokens=args.tokens, completions=args.completions,
                  checked=checked)


def started(programs: Programs, tree: Row, plain: Row) -> dict[str, dict]:
    """The runs of a ratio, by what they compute, and by (row, pass); all their programs compile."""
    return {"attention": attentions(programs, tree, plain),
            **{recipe: layers(programs, recipe, tree, plain) for recipe in RECIPES}}


def operands(tokens: int, seed: int = 0) -> tuple[Array, ...]:
    """q, k, v, do of a row of the model's heads."""
    heads = (MODEL.num_attention_heads, MODEL.num_key_value_heads, MODEL.num_key_value_heads,
             MODEL.num_attention_heads)
    keys = jax.random.split(jax.random.key(seed), len(heads))
    return tuple(jax.random.normal(key, (1, tokens, h, MODEL.head_dim), jnp.bfloat16)
                 for key, h in zip(keys, heads))


def attend(passed: str, ids: Array, ends: Array | None, q: Array, k: Array, v: Array, do: Array) -> tuple:
    tables = api.tables_of(ids, ends=ends)
    f = lambda q, k, v: api.attention(q, k, v, tables, backend="pallas")
    if passed == "forward":
        return (f(q, k, v),)
    o, pull = jax.vjp(f, q, k, v)
    return o, *pull(do)


PASSES = "forward", "forward and backward"


def attentions(programs: Programs, tree: Row, plain: Row) -> dict:
    runs = {}
    for name, one in (("tree", tree), ("plain", plain)):
        ids, _, ends = one.arrays(name == "tree")
        for passed in PASSES:
            wait = attention(programs, passed, ids, ends)
            runs[name, passed] = functools.partial(called, wait, lambda ids=ids, ends=ends: (
                ids, ends, *operands(ids.shape[1])))
    return runs


def attention(programs: Programs, passed: str, ids: Array, ends: Array | None) -> Callable[[], Callable]:
    """The program of a pass of attention alone."""
    T = ids.shape[1]
    shapes = jax.eval_shape(functools.partial(operands, T))
    return programs.start(f"attention {passed} {kind(ends)} {T}", jax.jit, functools.partial(attend, passed),
                          (ids, ends, *shapes))


def kind(ends: Array | None) -> str:
    return "plain" if ends is None else "tree"


def called(wait: Callable[[], Callable], drawn: Callable[[], tuple]) -> Callable[[int], Array]:
    """A run of a program, once it is compiled, with operands drawn now."""
    f, args = wait(), drawn()
    return lambda i: jax.tree.leaves(f(*args))[0]


def check(programs: Programs, tree: Row, plain: Row) -> dict[str, float]:
    """Of one set of q, k, v and do: by how much o of the tree differs from the plain row's, and whether the
    first sequence, whose prefix is shared, has its bits; and of the gradients of keys and values, summed over
    the copies."""
    (ids, _, ends), (plain_ids, _, _) = tree.arrays(True), plain.arrays(False)
    n = tree.members[0][0]
    places = np.zeros(plain_ids.shape[1], np.int64)  # in the tree, of each token of the plain row
    at = plain_at = 0
    for length, shared in tree.members:
        places[plain_at : plain_at + length] = [*range(shared), *range(at, at + length - shared)]
        at, plain_at = at + length - shared, plain_at + length
    q, k, v, do = operands(ids.shape[1])
    once = np.zeros(len(places), bool)  # a copy of a shared token has no part in the tree's gradients
    once[np.unique(places[:plain_at], return_index=True)[1]] = True
    copied = [x[:, places] for x in (q, k, v, do)]
    copied[3] *= once[None, :, None, None]
    run = lambda ids, ends, *operands: attention(programs, PASSES[1], ids, ends)()(ids, ends, *operands)
    ours, theirs = run(ids, ends, q, k, v, do), run(plain_ids, None, *copied)
    own = theirs[0][:, np.flatnonzero(once)]
    real = (plain_ids > 0)[..., None, None]
    summed = [jnp.zeros(a.shape, jnp.float32).at[:, places].add(b.astype(jnp.float32) * real)
              for a, b in zip(ours[1:], theirs[1:])]
    found = {"o": relative_l2(ours[0][:, places[once]], own)} | {
        name: relative_l2(a, b) for name, a, b in zip(("dq", "dk", "dv"), ours[1:], summed)}
    assert (ours[0][:, :n] == theirs[0][:, :n]).all(), "the first sequence has other bits in a tree"
    assert max(found.values()) < 1e-2, found
    return {name: float(x) for name, x in found.items()}


def layers(programs: Programs, recipe: str, tree: Row, plain: Row) -> dict:
    precision, runs = dataclasses.replace(precision_of(MODEL, recipe), attention="pallas"), {}
    for name, one in (("tree", tree), ("plain", plain)):
        ids, positions, ends = one.arrays(name == "tree")
        T, own = ids.shape[1], (ids, positions, ends)
        shapes = jax.eval_shape(functools.partial(draw, precision, T))
        for passed in PASSES:
            wait = programs.start(f"{recipe} {passed} {kind(ends)} {T}", rounding_exact_jit,
                                  functools.partial(layer, precision, passed), (*shapes, *own))
            runs[name, passed] = functools.partial(called, wait,
                                                   lambda T=T, own=own: (*draw(precision, T), *own))
    return runs


def layer(precision: Precision, passed: str, policy: dict, leaves: dict, x: Array, dy: Array, ids: Array,
          positions: Array, ends: Array | None):
    def f(leaves: dict, x: Array) -> Array:
        weights = jax.tree.map(lambda stack: stack[0], trainable(policy, leaves)["layers"][0])
        rope, attention = packed_attention(positions, ids, MODEL, precision, ends)()
        return DecoderLayer(MODEL, precision, precision.runs[0], rope, attention)(x, weights)[0]

    if passed == "forward":
        return f(leaves, x)
    y, pull = jax.vjp(f, leaves, x)
    return y, pull(dy)


if __name__ == "__main__":
    main()
