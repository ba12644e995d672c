"""Weights as a folder of safetensors: the slowest way from a learner to an engine, and the one that any tool
can check.

    FOLDER/model-00001-of-00002.safetensors ...    Hugging Face shards: a checkpoint but for its config.json
    FOLDER/model.safetensors.index.json            which tensor is in which shard
    FOLDER/publish.json                            version, manifest, its digest, and the SHA-256 of each tensor's bytes

The folder appears whole or not at all: it is written under another name, synced to the disk, and renamed. No
pickle anywhere.
"""

from __future__ import annotations

import contextlib
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
from bridges.served import wire

MANIFEST, INDEX = "publish.json", "model.safetensors.index.json"
SAFETENSORS_DTYPES = {
    "float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "uint8": "U8", "int8": "I8",
}
SHARD_BYTES = 4 * 2**30  # of which the writer holds one in memory


def write_folder(source: WeightSource, folder: str | Path, version: int, *,
                 shard_bytes: int = SHARD_BYTES) -> str:
    """Write every tensor of `source` to `folder`, which must not exist; its parent must. Returns the
    manifest's digest.

    Raises BridgeError where the folder exists, the disk is too small or a dtype has no place in a safetensors
    file; ValueError where the source contradicts its manifest; whatever the source raises. Then no folder is
    left.
    """
    folder, metas = Path(folder), source.manifest()
    _check_room(folder, metas)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        digest = manifest.digest(metas)
        hashes, files = _write_shards(partial, source, metas, shard_bytes)
        _write_json(partial / INDEX,
                    {"metadata": {"total_size": manifest.nbytes(metas)}, "weight_map": files})
        tensors = [{**row, "sha256": hashes[row["name"]]} for row in wire.pack_manifest(metas)]
        _write_json(partial / MANIFEST, {"version": version, "digest": digest, "tensors": tensors})
        _sync(partial)
        os.rename(partial, folder)
        _sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return digest


class FileSource:
    """WeightSource over a folder that `write_folder` wrote. Tensors are read one at a time, as they are asked
    for.

    `convert` makes an engine's buffer of each array (numpy, FP8 and bfloat16 by ml_dtypes); np.asarray, the
    default, suits engines that read numpy. `version` and `digest` are the folder's.

    Opening it checks everything but the tensors' bytes: raises BridgeError for a missing or damaged file, a
    digest that is not its manifest's, and, all listed, for tensors that are missing, too many, or of another
    dtype or shape than the manifest says. Reading raises BridgeError for a tensor whose bytes are not those
    that were written.
    """

    def __init__(self, folder: str | Path, convert: Callable[[np.ndarray], Any] = np.asarray):
        self._folder, self._convert = Path(folder), convert
        with _readable(self._folder / MANIFEST):
            content = json.loads((self._folder / MANIFEST).read_text())
            self.version, self.digest = int(content["version"]), str(content["digest"])
            self._hashes = {row["name"]: row.pop("sha256") for row in content["tensors"]}
            self._metas = wire.unpack_manifest(content["tensors"])
        if manifest.digest(self._metas) != self.digest:
            raise BridgeError(f"{self._folder / MANIFEST}: its digest is not that of the tensors it lists",
                              "write it again")
        with _readable(self._folder / INDEX):
            self._files = json.loads((self._folder / INDEX).read_text())["weight_map"]
        self._places = self._find()

    def manifest(self) -> tuple[ParamMeta, ...]:
        return self._metas

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return ((m.name, self._convert(self._read(m))) for m in self._metas)

    def _find(self) -> dict[str, tuple[Path, int]]:
        """HF name -> its shard, and where in it the tensor begins."""
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
            raise BridgeError(f"{self._folder} is not what its manifest says:\n  " + "\n  ".join(lines),
                              "write it again")
        return places

    def _read(self, m: ParamMeta) -> np.ndarray:
        dtype, (path, offset) = numpy_dtype(m.dtype), self._places[m.name]
        with _readable(path):
            data = np.fromfile(path, np.uint8, math.prod(m.shape) * dtype.itemsize, offset=offset)
        if _sha256(data) != self._hashes[m.name]:
            raise BridgeError(f"{path}: the bytes of {m.name} are not those that were written",
                              "write it again")
        return data.view(dtype).reshape(m.shape)


def _check_room(folder: Path, metas: Sequence[ParamMeta]) -> None:
    if unknown := sorted({m.dtype for m in metas} - SAFETENSORS_DTYPES.keys()):
        raise BridgeError(f"safetensors files are written here without {unknown[0]}",
                          f"use {', '.join(SAFETENSORS_DTYPES)}")
    if folder.exists():
        raise BridgeError(f"{folder} exists", "choose another folder or remove it first")
    need, free = manifest.nbytes(metas), shutil.disk_usage(folder.parent).free
    if need > free:
        raise BridgeError(
            f"{folder.parent} has {free / 2**30:.2f} GiB left, the weights are {need / 2**30:.2f} GiB",
            "make room, or use another disk")


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
        # transformers refuses a file that does not say so
        save_file(tensors, folder / file, metadata={"format": "pt"})
        _sync(folder / file)
    for _ in stream:  # strict=True counts only when it is asked for one more
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
    torch = sys.modules.get("torch")  # who hands over a torch tensor has imported it
    if torch is None or not isinstance(buffer, torch.Tensor):
        return np.asarray(buffer, order="C")
    codes = buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return codes.view(numpy_dtype(str(buffer.dtype).removeprefix("torch."))).reshape(buffer.shape)


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file begins, and its entries by name: {"dtype", "shape",
    "data_offsets"}.

    safetensors' own numpy reader has no FP8 (0.8), so the header is read here, after the library has found
    the file sound.
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
    def say(name: str) -> str:
        return f"{name}: {found.get(name, 'missing')} in the files, {want.get(name, 'missing')} in the manifest"

    return [say(name) for name in sorted(found.keys() | want.keys()) if found.get(name) != want.get(name)]


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as e:
        raise BridgeError(f"{path} cannot be read, it is missing, damaged or cut short: {e!r}",
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
    """Have the disk hold what was written: a rename may otherwise outlive the bytes it names when the power
    goes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
