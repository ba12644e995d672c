"""Parts of one array of a tree, as they cross: read from numpy's, torch's or JAX's array, wherever it lies.

A JAX array that is split over the devices of this process is read shard by shard: each device cuts its own
part, and one device joins what belongs to the tensor that is asked for. No device holds the whole array.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bridges.api import StackRow

WHOLE = slice(None)


class Part(NamedTuple):
    """`leaf[at]`, with the axes that are left in `order`, then of shape `shape`. `at` has an entry for
    each axis."""

    leaf: Any
    at: tuple[int | slice, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def rows(self, rows: slice) -> tuple[Part, slice]:
        """The part that has no other rows than these, where the leaf can be cut for it, and the rows that
        are left to take from the result."""
        if rows == WHOLE or not self.order:
            return self, rows
        axis = [axis for axis, i in enumerate(self.at) if isinstance(i, slice)][self.order[0]]
        stride = self.shape[0] // self.leaf.shape[axis]
        if rows.start % stride or rows.stop % stride:
            return self, rows
        cut = slice(rows.start // stride, rows.stop // stride)
        at = (*self.at[:axis], cut, *self.at[axis + 1 :])
        return self._replace(at=at, shape=(rows.stop - rows.start, *self.shape[1:])), WHOLE

    def read(self, dtype: str) -> Any:
        """The part as `dtype`, in the leaf's library; on one device, if it is JAX's."""
        x = self.leaf.detach() if hasattr(self.leaf, "detach") else self.leaf
        x = _from_shards(x, self.at, dtype) if is_split(x) else cast(x[self.at], dtype)
        return (x.permute(self.order) if hasattr(x, "permute")
                else x.transpose(self.order)).reshape(self.shape)

    def row(self) -> StackRow | None:
        """A JAX array's row, which stays where it lies, if the part is one as it is."""
        at = tuple(i for i in self.at if not isinstance(i, slice))
        left = self.at[len(at) :]
        as_it_is = self.order == tuple(range(len(left))) and self.shape == tuple(self.leaf.shape[len(at) :])
        if not (at and as_it_is and all(i == WHOLE
                                        for i in left)) or not is_jax(self.leaf) or is_split(self.leaf):
            return None
        return StackRow(self.leaf, at[0] if len(at) == 1 else at)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, array) of each array of a tree, in its order."""
    tree = tree.get_value() if hasattr(tree, "get_value") else tree  # an NNX Variable
    if hasattr(tree, "shape") and hasattr(tree, "dtype"):
        yield path, tree
        return
    if isinstance(tree, Mapping) or hasattr(tree, "named_parameters"):  # of a torch module
        children = tree.items() if isinstance(tree, Mapping) else tree.named_parameters()
    elif isinstance(tree, Sequence) and not isinstance(tree, str | bytes):
        children = zip(getattr(tree, "_fields", range(len(tree))), tree)
    else:
        plain = isinstance(tree, type) or hasattr(tree, "__code__") or not hasattr(tree, "__dict__")
        children = () if plain else ((k, v) for k, v in vars(tree).items() if not k.startswith("_"))
    for key, value in children:
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def local(x: Any) -> Any:
    """A leaf as this process reads it: of a JAX array with equal copies on several devices, one copy. Raises
    ValueError for one that is split over processes."""
    if not is_jax(x) or len(x.sharding.device_set) == 1:
        return x
    if x.is_fully_replicated:
        return min(x.addressable_shards, key=lambda shard: shard.device.id).data
    if not x.is_fully_addressable:
        raise ValueError("it is split over processes, of which this one holds a part: replicate it first, "
                         "in all processes: jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, "
                         "PartitionSpec()))")
    return x


def is_jax(x: Any) -> bool:
    return hasattr(x, "block_until_ready")


def is_split(x: Any) -> bool:
    return is_jax(x) and len(x.sharding.device_set) > 1


def _from_shards(x: Any, index: tuple[int | slice, ...], dtype: str) -> Any:
    """`x[index]` as `dtype` on the first of x's devices, from the parts of the shards that belong to it."""
    jax, pieces = sys.modules["jax"], {}
    shards = sorted(x.addressable_shards, key=lambda shard: shard.device.id)
    for shard in shards:
        cut = [_overlap(have, want, n) for have, want, n in zip(shard.index, index, x.shape)]
        held = [place for place in cut if place is not None]
        start = tuple(first for first, _ in held if first is not None)
        if len(held) == len(cut) and start not in pieces:  # copies of a shard are read once
            at = tuple(at for _, at in held)
            whole = at == tuple(slice(0, n) for n in shard.data.shape)
            part = cast(shard.data if whole else shard.data[at], dtype)
            pieces[start] = jax.device_put(part, shards[0].device)
    return _joined(sorted(pieces.items(), key=lambda piece: piece[0]))


def _overlap(have: slice, want: int | slice, n: int) -> tuple[int | None, int | slice] | None:
    """The first index that a shard has of `want` (None for a single index, which leaves no axis), and where
    it lies in the shard. None if the shard has nothing of it."""
    first, last, _ = have.indices(n)
    if not isinstance(want, slice):
        return (None, want - first) if first <= want < last else None
    start, stop = max(first, want.indices(n)[0]), min(last, want.indices(n)[1])
    return (start, slice(start - first, stop - first)) if start < stop else None


def _joined(pieces: list[tuple[tuple[int, ...], Any]], axis: int = 0) -> Any:
    """The array of pieces that lie on a grid, each with the index of its first element."""
    if len(pieces) == 1:
        return pieces[0][1]
    rows = [list(group) for _, group in itertools.groupby(pieces, key=lambda piece: piece[0][axis])]
    return concatenated([_joined(row, axis + 1) for row in rows], axis)


def concatenated(xs: Sequence[Any], axis: int = 0) -> Any:
    """In the library of the arrays."""
    if len(xs) == 1:
        return xs[0]
    if hasattr(xs[0], "detach"):
        return sys.modules["torch"].cat(tuple(xs), axis)
    return (sys.modules["jax"].numpy if is_jax(xs[0]) else np).concatenate(xs, axis)


def dtype_name(x: Any) -> str:
    return str(x.dtype).removeprefix("torch.")


def cast(x: Any, dtype: str) -> Any:
    import ml_dtypes

    if dtype_name(x) == dtype:
        return x
    if hasattr(x, "detach"):
        return x.to(getattr(sys.modules["torch"], dtype))
    return x.astype(getattr(ml_dtypes, dtype, dtype))


def lent(x: Any) -> Any:
    """A form that a transport can read through DLPack: row-major, and numpy's FP8 and bfloat16, which numpy
    does not export, as torch's or JAX's, whichever is loaded."""
    if not isinstance(x, np.ndarray):
        return x.contiguous() if hasattr(x, "contiguous") else x
    x, torch, jax = np.require(x, requirements=["C", "W"]), sys.modules.get("torch"), sys.modules.get("jax")
    if torch and x.dtype.isbuiltin != 1:
        return torch.from_numpy(x.view(f"i{x.itemsize}")).view(getattr(torch, x.dtype.name))
    return jax.numpy.asarray(x) if jax and x.dtype.isbuiltin != 1 else x
