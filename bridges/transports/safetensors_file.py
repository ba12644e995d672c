"""Publish weights as a folder of safetensors: the slowest transport, but any tool can check its files.

    FOLDER/model-00001-of-00002.safetensors ...    Hugging Face shards: a checkpoint without its config.json
    FOLDER/model.safetensors.index.json            the shard of each tensor
    FOLDER/publish.json                            version, manifest, its digest, and each tensor's SHA-256

The folder appears atomically: it is written under another name, synced to the disk, and renamed. No file is a
pickle.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bridges.api import BridgeError, ParamMeta, WeightSource
from bridges.proof import manifest

MANIFEST, INDEX = "publish.json", "model.safetensors.index.json"
SAFETENSORS_DTYPES = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint8": "U8", "int8": "I8",
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


class FileSource:
    """WeightSource over a folder that `write_folder` wrote. Tensors are read one at a time, when requested.

    `convert` turns each array (numpy, with FP8 and bfloat16 of ml_dtypes) into a buffer for the engine; the
    default np.asarray is for engines that read numpy. `version` and `digest` are those of the folder.

    Opening it checks everything but the tensors' bytes. It raises BridgeError for a missing or damaged file,
    for a wrong digest of the manifest, and, with a list of them, for tensors that are missing, unexpected, or
    of another dtype or shape than in the manifest. Reading raises BridgeError for a tensor whose bytes have
    changed.
    """

    def __init__(self, folder: str | Path, convert: Callable[[np.ndarray], Any] = np.asarray):
        self._folder, self._convert = Path(folder), convert
        with _readable(self._folder / MANIFEST):
            content = json.loads((self._folder / MANIFEST).read_text())
            self.version, self.digest = int(content["version"]), str(content["digest"])
            self._hashes = {row["name"]: row.pop("sha256") for row in content["tensors"]}
            self._metas = tuple(map(manifest.meta_of, content["tensors"]))
        if manifest.digest(self._metas) != self.digest:
            raise BridgeError(f"{self._folder / MANIFEST}: its digest does not match the tensors it lists",
                              "write it again")
        with _readable(self._folder / INDEX):
            self._files = json.loads((self._folder / INDEX).read_text())["weight_map"]
        self._places = self._find()

    def manifest(self) -> tuple[ParamMeta, ...]:
        return self._metas

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((m.name, self._convert(self._read(m))) for m in self._metas)

    def _find(self) -> dict[str, tuple[Path, int]]:
        """HF name -> (its shard, the tensor's offset in it in bytes)."""
        found, places = {}, {}
        for file in sorted(set(self._files.values())):
            if Path(file).name != file:
                raise BridgeError(f"{self._folder / INDEX}: {file!r} is not a file name of this folder",
                                  "write it again")
            start, header = _header(self._folder / file)
            found |= {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}
            places |= {name: (self._folder / file, start + entry["data_offsets"][0])
                       for name, entry in header.items()}
        want = {m.name: (SAFETENSORS_DTYPES.get(m.dtype), tuple(m.shape)) for m in self._metas}
        if lines := _differences(found, want):
            raise BridgeError(f"{self._folder} does not match its manifest:\n  " + "\n  ".join(lines),
                              "write it again")
        return places

    def _read(self, m: ParamMeta) -> np.ndarray:
        dtype, (path, offset) = numpy_dtype(m.dtype), self._places[m.name]
        with _readable(path):
            data = np.fromfile(path, np.uint8, math.prod(m.shape) * dtype.itemsize, offset=offset)
        if _sha256(data) != self._hashes[m.name]:
            raise BridgeError(f"{path}: the bytes of {m.name} have changed since they were written",
                              "write it again")
        return data.view(dtype).reshape(m.shape)


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


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """(offset of the data of a safetensors file in bytes, its entries by name: {"dtype", "shape",
    "data_offsets"}).

    safetensors' own numpy reader does not support FP8 (0.8), so the header is read here, after the library
    has checked the file.
    """
    from safetensors import safe_open

    with _readable(path):
        safe_open(path, "numpy").__exit__(None, None, None)
        with open(path, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
            header = json.loads(f.read(size))
    header.pop("__metadata__", None)
    return 8 + size, header


def _differences(found: dict[str, tuple], want: dict[str, tuple]) -> list[str]:
    def line(name: str) -> str:
        have, expected = found.get(name, "missing"), want.get(name, "missing")
        return f"{name}: {have} in the files, {expected} in the manifest"

    return [line(name) for name in sorted(found.keys() | want.keys()) if found.get(name) != want.get(name)]


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as e:
        raise BridgeError(f"{path} cannot be read; it is missing, damaged or cut short: {e!r}",
                          "write it again") from e


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
