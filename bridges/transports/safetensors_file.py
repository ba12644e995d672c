"""Publish weights as a folder of safetensors: the slowest transport, but any tool can check its files.

    FOLDER/model-00001-of-00002.safetensors ...    Hugging Face shards: a checkpoint without its config.json
    FOLDER/model.safetensors.index.json            the shard of each tensor
    FOLDER/publish.json                            version, manifest, its digest, and each tensor's SHA-256

The folder appears atomically: it is written under another name, synced to the disk, and renamed. No file is a
pickle.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridges.api import BridgeError, ParamMeta, WeightSource
from bridges.proof import manifest

MANIFEST, INDEX = "publish.json", "model.safetensors.index.json"
SAFETENSORS_DTYPES = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint8": "U8", "int8": "I8", "int32": "I32", "int64": "I64",
}
SHARD_BYTES = 4 * 2**30  # the writer holds one shard in memory


def write_folder(source: WeightSource, folder: str | Path, version: int, *,
                 shard_bytes: int = SHARD_BYTES) -> str:
    """Write every tensor of `source` to `folder`, which must not exist, in an existing parent folder -> the
    manifest's digest.

    Raises BridgeError if the folder exists, the disk is too small or safetensors does not support a dtype,
    ValueError if the source contradicts its manifest, and any error of the source. No folder is left after an
    error.
    """
    folder, metas = Path(folder), source.manifest()
    _check_room(folder, metas)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        digest = manifest.digest(metas)
        hashes, files = _write_shards(partial, source, metas, shard_bytes)
        _write_json(partial / INDEX,
                    {"metadata": {"total_size": manifest.nbytes(metas)}, "weight_map": files})
        tensors = [{**dataclasses.asdict(m), "sha256": hashes[m.name]} for m in metas]
        _write_json(partial / MANIFEST, {"version": version, "digest": digest, "tensors": tensors})
        _sync(partial)
        os.rename(partial, folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return digest


def _check_room(folder: Path, metas: Sequence[ParamMeta]) -> None:
    if unknown := sorted({m.dtype for m in metas} - SAFETENSORS_DTYPES.keys()):
        raise BridgeError(f"safetensors files cannot hold the dtype {unknown[0]}",
                          f"use {', '.join(SAFETENSORS_DTYPES)}")
    if folder.exists():
        raise BridgeError(f"{folder} exists", "choose another folder or remove it first")
    need, free = manifest.nbytes(metas), shutil.disk_usage(folder.parent).free
    if need > free:
        raise BridgeError(
            f"{folder.parent} has {free / 2**30:.2f} GiB left, but the weights take {need / 2**30:.2f} GiB",
            "free disk space, or use another disk")


def _write_shards(
    folder: Path, source: WeightSource, metas: Sequence[ParamMeta], shard_bytes: int
) -> tuple[dict[str, str], dict[str, str]]:
    """HF name -> SHA-256 of the tensor, and HF name -> its file."""
    from safetensors.numpy import save_file

    hashes, files, stream = {}, {}, iter(zip(metas, source, strict=True))
    shards = _plan(metas, shard_bytes)
    for i, names in enumerate(shards, 1):
        file, tensors = f"model-{i:05d}-of-{len(shards):05d}.safetensors", {}
        for meta, (name, buffer) in (next(stream) for _ in names):
            tensors[name] = host_array(buffer)
            manifest.check_tensor(meta, name, tensors[name].dtype.name, tensors[name].shape)
        hashes |= {name: _sha256(x) for name, x in tensors.items()}
        files |= dict.fromkeys(names, file)
        # transformers refuses a file without this metadata
        save_file(tensors, folder / file, metadata={"format": "pt"})
        _sync(folder / file)
    for _ in stream:  # zip's strict=True only raises when another item is requested
        pass
    return hashes, files


def _plan(metas: Sequence[ParamMeta], shard_bytes: int) -> list[list[str]]:
    """Names by shard: consecutive tensors, within `shard_bytes` unless one alone exceeds it."""
    shards, filled = [[]], 0
    for m in metas:
        size = manifest.nbytes([m])
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(m.name)
        filled += size
    return shards


def host_array(buffer: Any) -> np.ndarray:
    """A buffer of numpy, JAX, torch, or a StackRow as a row-major numpy array on the host, FP8 and bfloat16
    by ml_dtypes."""
    torch = sys.modules.get("torch")  # a caller with a torch tensor has imported torch
    if torch is None or not isinstance(buffer, torch.Tensor):
        return np.asarray(buffer, order="C")
    codes = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return codes.view(numpy_dtype(str(buffer.dtype).removeprefix("torch."))).reshape(buffer.shape)


def numpy_dtype(name: str) -> np.dtype:
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name, name))


def _sha256(x: np.ndarray) -> str:
    return hashlib.sha256(x.reshape(-1).view(np.uint8)).hexdigest()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
    _sync(path)


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk. Otherwise a rename may survive a power failure that loses the
    bytes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
