"""The digest of `bridges.proof.digest` without JAX: in numpy for memory of the host, by a kernel
(`bridges.proof.digest_kernel`) for that of a GPU."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from bridges.api import Cut

if TYPE_CHECKING:
    import torch

FACTOR, OFFSET, MIXER = 0x9E3779B1, 0x7F4A7C15, 0x85EBCA6B  # the key of a position


def digest_of(tensor: torch.Tensor) -> np.ndarray:
    """The digest of a contiguous torch tensor of any shape and type: [2] uint32."""
    return reader([tensor])()[0, :2]


def reader(tensors: Sequence[torch.Tensor], scales: Sequence[bool] | None = None) -> Callable[[], np.ndarray]:
    """A function that reads contiguous tensors where they are, all on one device: [n, 3] uint32, the two sums
    of each digest, and how many words of a tensor of scales are no positive, finite float32."""
    scales = scales or [False] * len(tensors)
    if not tensors[0].is_cuda:
        return lambda: np.stack([_of_host(t, is_scale) for t, is_scale in zip(tensors, scales)])
    from bridges.proof.digest_kernel import Region, Regions

    regions = [Region(t, i, scale=is_scale) for i, (t, is_scale) in enumerate(zip(tensors, scales))]
    lasting = Regions(regions)
    return lambda: (Regions(regions) if lasting.copied else lasting).read().cpu().numpy().view(np.uint32)


def _of_host(tensor: torch.Tensor, is_scale: bool) -> np.ndarray:
    import torch

    columns = (tensor.shape[-1] if tensor.dim() else 1) * tensor.element_size()
    raw = tensor.reshape(-1).view(torch.uint8).numpy()
    numbers = raw.view(np.float32) if is_scale else np.ones(0, np.float32)
    unsound = (~(np.isfinite(numbers) & (numbers > 0))).sum()
    return np.array([*host_digest(raw.reshape(-1, columns)), unsound], np.uint32)


def host_digest(array: np.ndarray, at: tuple[int, int] | None = None) -> np.ndarray:
    """The digest of an array of any shape and type: [2] uint32.

    at: (position of its first word, words from one row to the next) in a larger tensor. The digests of the
    parts of a tensor add up to that of the whole, modulo 2^32.
    """
    columns = array.shape[-1] * array.itemsize if array.ndim else array.itemsize
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(-1, columns)
    if missing := -columns % 4:
        raw = np.pad(raw, [(0, 0), (0, missing)])
    words = raw.view("<u4")
    first, step = at or (0, words.shape[1])
    rows = first + step * np.arange(len(words))
    k = rows.astype(np.uint32)[:, None] + np.arange(words.shape[1], dtype=np.uint32)
    k = k * np.uint32(FACTOR) + np.uint32(OFFSET)
    k = (k ^ (k >> 15)) * np.uint32(MIXER)
    one = np.uint32(1)
    return np.array([(words * (k | one)).sum(dtype=np.uint32),
                     (_rot(words) * (_rot(k) | one)).sum(dtype=np.uint32)])


def place(part: Cut, cut: Cut, itemsize: int) -> tuple[int, int]:
    """`at` of the box `part` of a tensor in what `cut` has of it. Raises ValueError where a word of 4 bytes
    has bytes of another box, or rows of the part are not evenly far apart."""
    if not part:
        return 0, 1
    (first, stop), (start, end) = part[-1], cut[-1]
    step = -(-(end - start) * itemsize // 4)
    if any((edge - start) * itemsize % 4 for edge in {first, stop} - {end}):
        raise ValueError(f"columns [{first}, {stop}) of [{start}, {end}) with {itemsize} bytes each: they do "
                         "not end at whole words of 4 bytes")
    if part[1:-1] != cut[1:-1]:
        raise ValueError(f"{part} of {cut} is cut along an axis between the first and the last")
    between = math.prod(b - a for a, b in cut[1:-1])
    rows = (part[0][0] - cut[0][0]) * between if len(part) > 1 else 0
    return rows * step + (first - start) * itemsize // 4, step


def _rot(x: np.ndarray) -> np.ndarray:
    return x << np.uint32(16) | x >> np.uint32(16)


class Content:
    """One digest of all tensors: of their names and their digests [n, 2], whatever their order. Experts have
    tens of thousands of names, which are sorted once."""

    def __init__(self, names: Sequence[str]):
        self._order, self._names = np.argsort(names), hashlib.sha256("\n".join(sorted(names)).encode())

    def of(self, digests: np.ndarray) -> str:
        found = self._names.copy()
        found.update(np.ascontiguousarray(digests[self._order]).tobytes())
        return found.hexdigest()
