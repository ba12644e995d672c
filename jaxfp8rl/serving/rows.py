"""Data of a request as packed rows, in few shapes.

The sequences of a request are packed into rows of `train.row_tokens`. A request that needs less than one
micro-batch of such rows gets shorter ones, of a power of two of tokens. One that needs more gets a power of
two of micro-batches, and those that stay empty are skipped on the device. A server that has seen requests of
each size therefore does not compile any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int

from jaxfp8rl.data.packing import assign_rows

SHORTEST = 128  # tokens of a row, unless train.row_tokens is less


class Datum(NamedTuple):
    """A sequence with a target at each position. tokens [T] int32, targets [T] int32: targets[t] is predicted
    from tokens[: t + 1]. inputs: the loss's own, each [T] float32."""

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]


class Rows(NamedTuple):
    """Packed data, M micro-batches of R rows of T tokens. `live`: True at positions of a datum. `inputs`: the
    loss's own, 0 elsewhere. The other fields are those of jaxfp8rl.types.TrainBatch."""

    tokens: Int[Array, "*M R T"]
    positions: Int[Array, "*M R T"]
    segment_ids: Int[Array, "*M R T"]
    targets: Int[Array, "*M R T"]
    live: Bool[Array, "*M R T"]
    inputs: dict[str, Float[Array, "*M R T"]]


def pack(data: Sequence[Datum], row_tokens: int, rows_per_microbatch: int, names: Sequence[str]) -> Rows:
    """Lay data out as numpy arrays [M, rows_per_microbatch, T], M a power of two, T at most row_tokens.
    `names`: the inputs that rows have, 0 where a datum has none. Raises ValueError for a datum that is longer
    than a row."""
    row_tokens = _width([len(d.tokens) for d in data], row_tokens, rows_per_microbatch)
    members = assign_rows([len(d.tokens) for d in data], row_tokens)
    needed = -(-len(members) // rows_per_microbatch)
    microbatches = 1 << max(needed - 1, 0).bit_length()
    shape = (microbatches * rows_per_microbatch, row_tokens)
    tokens, positions, segment_ids, targets = (np.zeros(shape, np.int32) for _ in range(4))
    inputs = {name: np.zeros(shape, np.float32) for name in names}
    for r, found in enumerate(members):
        at = 0
        for segment, i in enumerate(found, 1):
            place = r, slice(at, at := at + len(data[i].tokens))
            tokens[place], targets[place] = data[i].tokens, data[i].targets
            positions[place], segment_ids[place] = np.arange(len(data[i].tokens)), segment
            for name, values in data[i].inputs.items():
                inputs[name][place] = values
    split = lambda x: x.reshape(microbatches, rows_per_microbatch, row_tokens)
    arrays: Any = [split(x) for x in (tokens, positions, segment_ids, targets, segment_ids > 0)]
    return Rows(*arrays, inputs={name: split(x) for name, x in inputs.items()})


def _width(lengths: Sequence[int], row_tokens: int, rows: int) -> int:
    """The tokens of a row: the fewest, in powers of two from SHORTEST on, with which one micro-batch holds
    all sequences; row_tokens if none does."""
    width = SHORTEST
    while width < row_tokens and (width < max(lengths) or len(assign_rows(lengths, width)) > rows):
        width *= 2
    return min(width, row_tokens)


def unpack(values: np.ndarray, data: Sequence[Datum]) -> list[np.ndarray]:
    """The part [len(tokens)] of each datum in `values` [M, R, T] of the rows that `pack` made of them."""
    rows, found = values.reshape(-1, values.shape[-1]), {}
    for r, members in enumerate(assign_rows([len(d.tokens) for d in data], rows.shape[1])):
        at = 0
        for i in members:
            found[i] = rows[r, at : (at := at + len(data[i].tokens))]
    return [found[i] for i in range(len(data))]
