"""Reads a folder of `bridges.transports.safetensors_file`, as any tool may: the manifest, the SHA-256 and the
bytes of each tensor. safetensors' own numpy reader does not know FP8."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from bridges.proof import manifest
from bridges.sources.array_source import ArraySource
from bridges.transports.safetensors_file import MANIFEST, numpy_dtype
from bridges.vllm_plugin.paths import places


def read_folder(folder: Path) -> tuple[int, ArraySource]:
    """Its version, and its tensors."""
    said, found, arrays = json.loads((folder / MANIFEST).read_text()), places(folder), {}
    for row in said["tensors"]:
        (path, start), sha256 = found[row["name"]], row.pop("sha256")
        meta = manifest.meta_of(row)
        raw = np.fromfile(path, np.uint8, manifest.nbytes([meta]), offset=start)
        assert hashlib.sha256(raw).hexdigest() == sha256, meta.name
        arrays[meta.name] = raw.view(numpy_dtype(meta.dtype)).reshape(meta.shape)
    metas = tuple(map(manifest.meta_of, said["tensors"]))
    assert said["digest"] == manifest.digest(metas) and found.keys() == arrays.keys()
    return said["version"], ArraySource(metas, arrays)


def tensors(folder: Path) -> dict[str, Any]:
    return dict(read_folder(folder)[1])
