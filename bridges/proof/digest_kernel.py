"""The digests of many tensors of a GPU by one Triton kernel, in a single read of them. `byte_digest` has the
same in numpy and torch, `digest` in JAX."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

BLOCK, STEPS = 4096, 16  # words at once, and blocks of a program


class Region(NamedTuple):
    """A contiguous tensor of a GPU, or a part of one, whose digest is added to row `row` of a table.

    at: (position of its first word, words from one row to the next) in the tensor that it is a part of.
    scale: whether to count words that are no positive, finite float32.
    """

    tensor: torch.Tensor
    row: int
    at: tuple[int, int] | None = None
    scale: bool = False


class Regions:
    """Regions of one GPU, which stay where they are in memory, to be read as often as one likes.

    copied: whether some are read from padded copies, which do not change with their tensors.
    """

    def __init__(self, regions: Sequence[Region]):
        import torch

        self._words = [words_of(r.tensor) for r in regions]
        self.copied = any(w.data_ptr() != r.tensor.data_ptr() for w, r in zip(self._words, regions))
        self._rows, self._device = 1 + max(r.row for r in regions), self._words[0].device
        lines, chunks = [], []
        for i, (region, words) in enumerate(zip(regions, self._words)):
            rows, columns = words.shape
            first, step = region.at or (0, columns)
            lines.append((words.data_ptr(), rows * columns, columns, first, step, region.row, region.scale))
            starts = np.arange(0, rows * columns, BLOCK * STEPS)
            chunks.append(np.stack([np.full_like(starts, i), starts], 1))
        self._lines = torch.from_numpy(np.array(lines, np.int64)).to(self._device)
        self._chunks = torch.from_numpy(np.concatenate(chunks).astype(np.int32)).to(self._device)

    def read(self) -> torch.Tensor:
        """A table [rows, 3] of int32 on the GPU, for which nobody has waited: the two sums of each digest,
        which wrap, and the number of unsound words."""
        import torch

        with torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext():
            table = torch.zeros((self._rows, 3), dtype=torch.int32, device=self._device)
            _add_digests[(len(self._chunks),)](
                self._lines, self._chunks, table, BLOCK, STEPS)  # pyright: ignore[reportArgumentType]
        return table


def words_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as int32 words [rows, columns]: a view, or, if its rows are not whole words, a
    padded copy."""
    import torch

    columns = (tensor.shape[-1] if tensor.dim() else 1) * tensor.element_size()
    flat = tensor.reshape(-1).view(torch.uint8).view(-1, columns)
    if missing := -columns % 4:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(torch.int32)


@triton.jit
def _add_digests(lines, chunks, table, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """A program reads STEPS * BLOCK words of one region."""
    line = lines + 7 * tl.load(chunks + 2 * tl.program_id(0))
    start = tl.load(chunks + 2 * tl.program_id(0) + 1)
    words = tl.load(line).to(tl.pointer_type(tl.uint32))
    count, columns = tl.load(line + 1).to(tl.int32), tl.load(line + 2).to(tl.int32)
    first, step = tl.load(line + 3).to(tl.uint32), tl.load(line + 4).to(tl.int32)
    row, scale = tl.load(line + 5), tl.load(line + 6).to(tl.int32)
    low = tl.zeros([BLOCK], tl.uint32)
    high = tl.zeros([BLOCK], tl.uint32)
    unsound = tl.zeros([BLOCK], tl.int32)
    for i in range(STEPS):
        at = start + i * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        w = tl.load(words + at, inside, 0)
        k = at
        if step != columns:
            k = at // columns * step + at % columns
        k = (k.to(tl.uint32) + first) * 0x9E3779B1 + 0x7F4A7C15
        k = (k ^ (k >> 15)) * 0x85EBCA6B
        low += w * (k | 1)
        high += ((w << 16) | (w >> 16)) * (((k << 16) | (k >> 16)) | 1)
        unsound += (inside & ((w == 0) | (w >= 0x7F800000))).to(tl.int32) * scale
    tl.atomic_add(table + 3 * row, tl.sum(low.to(tl.int64), 0).to(tl.int32))
    tl.atomic_add(table + 3 * row + 1, tl.sum(high.to(tl.int64), 0).to(tl.int32))
    if scale != 0:
        tl.atomic_add(table + 3 * row + 2, tl.sum(unsound, 0))
