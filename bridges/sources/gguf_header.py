"""The header of a GGUF file: its metadata and its table of tensors.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3,
little-endian). Reading it takes about a second where gguf-py takes 20 for a vocabulary of 262,144, so that a
file that cannot be imported is refused at once.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bridges.api import BridgeError

TYPES = (  # those that gguf-py dequantises
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0",
)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _LONGEST_ARRAY = 8, 9, 4096


class TensorEntry(NamedTuple):
    """A tensor of the file. shape: as torch has it, [out, in]. start, nbytes: its place in the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    start: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Header:
    """metadata: scalars, strings and arrays of up to 4,096 numbers; None for every other array.
    alignment: tensors start at its multiples, and writers pad the last one to it."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: tuple[TensorEntry, ...]
    alignment: int


def read_header(path: str | Path) -> Header:
    """The header of a GGUF file.

    Raises BridgeError if the file is missing, is not GGUF, has tensors of an unknown type (named, with the
    known ones), is one of several that were split, or is shorter or longer than its table of tensors says.
    """
    path = Path(path)
    _check_is_gguf(path)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            header = _parse(path, data)
        except (struct.error, UnicodeDecodeError, OverflowError) as e:
            raise BridgeError(f"{path}: the GGUF header is damaged or cut short: {e}",
                              "download it again") from e
        _check_is_whole(header, len(data))
    return header


def _check_is_gguf(path: Path) -> None:
    if not path.is_file():
        raise BridgeError(f"no GGUF file at {path}", "give the path of a .gguf file")
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise BridgeError(f"{path} is not a GGUF file: it begins with {magic!r}", "download it again")


def _check_is_whole(header: Header, size: int) -> None:
    if header.metadata.get("split.count", 1) > 1:
        raise BridgeError(f"{header.path} is one of {header.metadata['split.count']} files of a split model",
                          "join them with `llama-gguf-split --merge FIRST OUT`")
    end = max((t.start + t.nbytes for t in header.tensors), default=0)
    if not end <= size <= _aligned(end, header.alignment):
        raise BridgeError(f"{header.path} has {size:,} bytes, but its table of tensors ends at {end:,}",
                          "download it again")


class _Cursor:
    """Reads values one after another."""

    def __init__(self, data: mmap.mmap):
        self.data, self.at = data, 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return values

    def string(self) -> str:
        (length,) = self.numbers("Q")
        return self.numbers(f"{length}s")[0].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(*self.numbers("IQ"))
        return self.numbers(_scalar(kind))[0]

    def _array(self, kind: int, count: int) -> list[Any] | None:
        if kind in (_STRING, _ARRAY):
            for _ in range(count):
                self.value(kind)
            return None
        values = self.numbers(f"{count}{_scalar(kind)}")
        return list(values) if count <= _LONGEST_ARRAY else None


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise struct.error(f"metadata of the unknown type {kind}")
    return _SCALARS[kind]


def _parse(path: Path, data: mmap.mmap) -> Header:
    cursor = _Cursor(data)
    version, tensors, pairs = cursor.numbers("4xIQQ")
    if version not in (2, 3):
        raise BridgeError(f"{path} has GGUF version {version}; versions 2 and 3 (little-endian) are known",
                          "convert the model again with a current llama.cpp")
    metadata = {cursor.string(): cursor.value(cursor.numbers("I")[0]) for _ in range(pairs)}
    rows = [(cursor.string(), *_place(cursor)) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    return Header(path, metadata, _entries(path, rows, _aligned(cursor.at, alignment)), alignment)


def _place(cursor: _Cursor) -> tuple[tuple[int, ...], int, int]:
    """(shape, number of the type, offset); ggml lists the fastest dimension first."""
    (dimensions,) = cursor.numbers("I")
    shape = cursor.numbers(f"{dimensions}Q")[::-1]
    return shape, *cursor.numbers("IQ")  # type: ignore[return-value]


def _entries(path: Path, rows: list[tuple[str, tuple[int, ...], int, int]],
             start: int) -> tuple[TensorEntry, ...]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    names = {int(kind): kind.name for kind in GGMLQuantizationType}
    unknown = sorted({names.get(kind, f"number {kind}") for _, _, kind, _ in rows} - set(TYPES))
    if unknown:
        name = next(name for name, _, kind, _ in rows if names.get(kind, f"number {kind}") == unknown[0])
        raise BridgeError(f"{path}: tensors of the type {', '.join(unknown)}, {name} for one, cannot be read",
                          f"take a file with other types; known are {', '.join(TYPES)}")
    return tuple(
        TensorEntry(name, shape, names[kind], start + offset, math.prod(shape) // block * size)
        for name, shape, kind, offset in rows
        for block, size in [GGML_QUANT_SIZES[GGMLQuantizationType(kind)]]
    )


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment
