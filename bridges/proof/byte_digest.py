"""The digest of `bridges.proof.digest` without JAX: in numpy for memory of the host, in torch for that of a
GPU."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import numpy as np

from bridges.api import Cut

if TYPE_CHECKING:
    import torch

FACTOR, OFFSET, MIXER = 0x9E3779B1, 0x7F4A7C15, 0x85EBCA6B  # the key of a position
CHUNK = 2**24  # words that torch digests at once: it keeps a few copies of them


def digest_of(tensor: torch.Tensor, at: tuple[int, int] | None = None) -> np.ndarray:
    """The digest of a contiguous torch tensor of any shape and type: [2] uint32.

    at: (position of its first word, words from one row to the next) in a larger tensor. The digests of the
    parts of a tensor add up to that of the whole, modulo 2^32.
    """
    import torch

    columns = (tensor.shape[-1] if tensor.dim() else 1) * tensor.element_size()
    flat = tensor.reshape(-1).view(torch.uint8)
    if not flat.is_cuda:
        return host_digest(flat.numpy().reshape(-1, columns), at)
    if missing := -columns % 4:
        flat = torch.nn.functional.pad(flat.view(-1, columns), (0, missing)).reshape(-1)
    return torch_digest(flat.view(torch.int32).view(-1, -(-columns // 4)), at)


def host_digest(array: np.ndarray, at: tuple[int, int] | None = None) -> np.ndarray:
    """The digest of an array of any shape and type: [2] uint32. at: as in `digest_of`."""
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


def torch_digest(words: torch.Tensor, at: tuple[int, int] | None = None) -> np.ndarray:
    """The digest of int32 words [rows, columns], whose products wrap: [2] uint32. at: as in `digest_of`."""
    import torch

    first, step = at or (0, words.shape[1])
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    columns = torch.arange(words.shape[1], dtype=torch.int32, device=words.device)
    for start in range(0, len(words), each := max(CHUNK // max(words.shape[1], 1), 1)):
        w = words[start : start + each]
        rows = first + step * torch.arange(start, start + len(w), device=w.device)
        k = (rows.to(torch.int32)[:, None] + columns) * _signed(FACTOR)
        k = k + _signed(OFFSET)
        k = (k ^ _shifted(k, 15)) * _signed(MIXER)
        terms = w * (k | 1), _rotated(w) * (_rotated(k) | 1)
        sums += torch.stack([x.sum(dtype=torch.int64) for x in terms])
    return (sums & 0xFFFFFFFF).cpu().numpy().astype(np.uint32)


def _signed(constant: int) -> int:
    return constant - 2**32 if constant >= 2**31 else constant


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    """A right shift that fills with zeros; torch's fills with the sign."""
    return (x >> bits) & (2 ** (32 - bits) - 1)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    return (x << 16) | _shifted(x, 16)


def content(names: list[str], digests: np.ndarray) -> str:
    """One digest of all tensors: of their names and their digests [n, 2], whatever their order."""
    found = hashlib.sha256("\n".join(sorted(names)).encode())
    found.update(np.ascontiguousarray(digests[np.argsort(names)]).tobytes())
    return found.hexdigest()


def unsound(tensor: torch.Tensor) -> bool:
    """Whether a float32 scale is not positive and finite."""
    import torch

    return bool(tensor.numel() and not (torch.isfinite(tensor).all() and (tensor > 0).all()))
