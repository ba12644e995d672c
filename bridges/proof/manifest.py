"""Manifests: the ordered list of published tensors, its digest, and readable differences between two
lists."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bridges.api import ManifestMismatch, ParamMeta

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1,
             "int8": 1, "int32": 4, "int64": 8}


def meta_of(row: Mapping[str, Any]) -> ParamMeta:
    """The inverse of `dataclasses.asdict`, also after JSON has made lists of tuples. Raises TypeError for
    another field."""
    block = tuple(row["block"]) if row["block"] else None
    return ParamMeta(**{**row, "shape": tuple(row["shape"]), "block": block})


def digest(metas: Iterable[ParamMeta]) -> str:
    """SHA-256 over names, dtypes, shapes, roles and blocks, in order: equal digests mean the same wire
    layout."""
    rows = [[m.name, m.dtype, list(m.shape), m.role, m.block] for m in metas]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def nbytes(metas: Iterable[ParamMeta]) -> int:
    """The total number of bytes of the tensors."""
    return sum(math.prod(m.shape) * itemsize(m) for m in metas)


def itemsize(meta: ParamMeta) -> int:
    return _ITEMSIZE[meta.dtype]


def differences(have: Sequence[ParamMeta], want: Sequence[ParamMeta]) -> list[str]:
    """The differences between `have` (the source) and `want` (the engine), one line each; the order of
    tensors does not count."""
    a, b = {m.name: m for m in have}, {m.name: m for m in want}
    lines = [f"{n}: in the engine, missing from the source" for n in b if n not in a]
    lines += [f"{n}: in the source, unknown to the engine" for n in a if n not in b]
    for n in a.keys() & b.keys():
        for field in ("dtype", "shape", "role", "block"):
            x, y = getattr(a[n], field), getattr(b[n], field)
            if x != y:
                lines.append(f"{n}: {field} {x} in the source, {y} in the engine")
    if len(a) != len(have):
        lines.append("the source names a tensor twice")
    return sorted(lines)


def check(have: Sequence[ParamMeta], want: Sequence[ParamMeta]) -> None:
    """Raise ManifestMismatch, listing up to ten differences, unless the two manifests name the same
    tensors."""
    lines = differences(have, want)
    if lines:
        more = f"\n  ... and {len(lines) - 10} more" if len(lines) > 10 else ""
        raise ManifestMismatch(
            f"the source's weights do not match those the engine expects ({len(lines)} differences):\n  "
            + "\n  ".join(lines[:10]) + more,
            "build both sides from the same config.json and the same precision recipe",
        )


def check_tensor(meta: ParamMeta, name: str, dtype: str, shape: Sequence[int]) -> None:
    """Raise ValueError unless a tensor that a source yields matches the entry of its manifest."""
    have, want = (name, dtype, tuple(shape)), (meta.name, meta.dtype, tuple(meta.shape))
    if have != want:
        raise ValueError(f"the source yields {have}, but its manifest says {want}")
