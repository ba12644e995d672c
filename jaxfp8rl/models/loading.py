"""Hugging Face folders in and out: config.json and safetensors. Never a pickle, never torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxfp8rl.errors import ModelError, nearest
from jaxfp8rl.models.config import ModelConfig, how_to_get
from jaxfp8rl.models.hf_names import Entry, empty_params, get_param, is_packed, param_table, set_param
from jaxfp8rl.models.packed import PackedReader, check_packable, packed_tensors, stored_parts
from pallas_kernels.four_bits import FourBits

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt",
    "tokenizer.model", "chat_template.jinja", "generation_config.json",
)
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}  # of safetensors
_DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(bfloat16)}
_TIED, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load_params(
    folder: str | Path, cfg: ModelConfig | None = None, dtype: str = "float32"
) -> tuple[ModelConfig, dict[str, Any]]:
    """Read a Hugging Face folder into a tree of numpy arrays in `dtype`, layers stacked; one tensor is in
    flight at a time, and of a model with tied embeddings these. Weights in four bits are FourBits; those that
    `cfg` wants so and the folder has as floats are quantised as `jaxfp8rl quantize` does.

    `cfg` defaults to the folder's config.json. `dtype` "stored": the type that holds every weight of the
    folder exactly, bfloat16 for most. Raises ModelError as `check_weights` does, before a weight is read.
    """
    folder = Path(folder)
    cfg = check_weights(folder, cfg)
    entries = {e.hf_name: e for e in param_table(cfg)}
    params = empty_params(cfg, _stored_dtype(folder, entries) if dtype == "stored" else _DTYPES[dtype])
    four_bits = PackedReader(cfg, folder)
    if cfg.packed and not cfg.packed.stored:
        for entry, weight in packed_tensors(cfg, reading(folder)):
            if not isinstance(weight, FourBits):
                set_param(params, entry, weight)
                continue
            for name, part in stored_parts(entry, weight):
                four_bits.take(name, lambda part=part: part)
        return cfg, four_bits.into(params)
    for tensor in stored(folder):
        if tensor.name in entries:
            set_param(params, entries[tensor.name], tensor.read())
        else:
            four_bits.take(tensor.name, tensor.read)
    return cfg, four_bits.into(params)


def _stored_dtype(folder: Path, entries: dict[str, Entry]) -> np.dtype:
    """The smallest type that holds every one of the tensors exactly."""
    named = {stored: _DTYPES[name] for name, stored in NAMES.items()}
    types = {named[tensor.dtype] for tensor in stored(folder) if tensor.name in entries}
    return types.pop() if len(types) == 1 else np.dtype(np.float32)


def check_weights(folder: str | Path, cfg: ModelConfig | None = None) -> ModelConfig:
    """Raise ModelError for a missing, corrupt or pickled checkpoint, and for any tensor that is missing,
    unknown, of another shape than the config says or of a type that cannot be trained. Headers are read, and
    of weights only an lm_head that is said to be the embedding: it takes a second for any model. Returns
    `cfg`, by default the folder's config.json."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelError(f"no model folder at {folder}",
                         f"nothing is downloaded at run time: {how_to_get(folder)}")
    wanted = cfg or ModelConfig.from_hf(folder)
    if wanted.packed:
        check_packable(wanted)
    # how the folder has them: those that are yet to be quantised are floats there
    cfg = wanted if not wanted.packed or wanted.packed.stored else dataclasses.replace(wanted, packed=None)
    four_bits, seen = PackedReader(cfg, folder), set()
    entries = {e.hf_name: e for e in param_table(cfg) if not is_packed(e, cfg)}
    for tensor in stored(folder):
        if four_bits.checked(tensor.name, tensor.shape, tensor.dtype, tensor.read):
            seen.add(tensor.name)
            continue
        _check_dtype(tensor)
        if tensor.name in entries:
            _check_shape(entries[tensor.name], tensor, folder)
        elif not _may_be_left(tensor.name, cfg):
            raise ModelError(f"{folder}: unknown tensor "
                             f"{tensor.name}{nearest(tensor.name, (*entries, *four_bits.needed))}",
                             "does config.json belong to it?")
        seen.add(tensor.name)
    _check_complete((*entries, *four_bits.needed), seen, folder)
    four_bits.check_scales()
    if cfg.tie_word_embeddings and _TIED in seen:
        _check_tied(folder)
    return wanted


def _may_be_left(name: str, cfg: ModelConfig) -> bool:
    """An lm_head that is the embedding; and RoPE's frequencies, which older Llama exports store and the
    config determines."""
    return (name == _TIED and cfg.tie_word_embeddings) or name.endswith(".rotary_emb.inv_freq")


def _check_tied(folder: Path) -> None:
    """As they are stored: rounded to another type, equal ones would differ from others."""
    both = {tensor.name: tensor.read() for tensor in stored(folder) if tensor.name in (_TIED, _EMBEDDING)}
    if not np.array_equal(both[_TIED], both[_EMBEDDING].astype(both[_TIED].dtype)):
        raise ModelError(
            f"{folder}: tie_word_embeddings is true but {_TIED} differs from model.embed_tokens.weight",
            "set tie_word_embeddings to false in config.json, or drop the tensor",
        )


def check_empty(folder: Path) -> None:
    """Raise ModelError unless `folder` may be written: it is not there, or has nothing in it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} exists and is not empty", "choose another folder or remove it first")


def save_params(
    folder: str | Path, cfg: ModelConfig, params: dict[str, Any], dtype: str = "bfloat16",
    max_shard_bytes: float = 5e9, tokenizer_from: str | Path | None = None,
) -> None:
    """Write a Hugging Face folder: safetensors in `dtype` (sharded past `max_shard_bytes`), config.json,
    tokenizer files.

    All of it appears at once, by renaming a finished temporary folder. Raises ModelError when `folder` is not
    empty, or the disk does not take it.
    """
    with appearing(Path(folder)) as partial:
        _write_tensors(partial, cfg, params, _DTYPES[dtype], max_shard_bytes)
        write_json(partial / "config.json", dataclasses.replace(cfg, dtype=dtype).to_hf())
        for name in TOKENIZER_FILES:
            if tokenizer_from and (file := Path(tokenizer_from) / name).is_file():
                shutil.copyfile(file, partial / name)


@contextlib.contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which takes the name `folder` at the end. After an error nothing is left.

    Raises ModelError when `folder` is not empty, or the disk does not take what safetensors writes.
    """
    check_empty(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield partial
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors' files are private, as are
        partial.chmod(0o755)  # mkdtemp's folders
        os.rename(partial, folder)
    except BaseException as e:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(e, SafetensorError):  # it wraps what the disk said
            raise ModelError(f"{folder} cannot be written: {e}", "make room, or choose another folder") from e
        raise


def numpy_dtype(name: str) -> np.dtype:
    """The numpy type of "float32", "float16" or "bfloat16"."""
    return _DTYPES[name]


class Stored(NamedTuple):
    """A tensor of a safetensors file that is open."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


def stored(folder: Path) -> Iterator[Stored]:
    """Every tensor of the folder's safetensors files, one at a time."""
    for path, expected in _files(folder).items():
        try:
            with safe_open(path, "np") as file:
                names = list(file.keys())
                if absent := expected - set(names):
                    raise ModelError(f"{path}: the index places {min(absent)} here and it is not",
                                     "download it again")
                for name in names:
                    header = file.get_slice(name)
                    dtype = header.get_dtype()
                    read = functools.partial(_codes, path, name) if dtype == "F8_E4M3" else functools.partial(
                        file.get_tensor, name)
                    yield Stored(path, name, tuple(header.get_shape()), dtype, read)
        except (SafetensorError, OSError) as e:
            raise ModelError(f"{path} cannot be read, it is corrupt or cut short: {e}",
                             "download or copy it again") from e


def _codes(path: Path, name: str) -> np.ndarray:
    """An E4M3 tensor, which safetensors' numpy reader does not know."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        said = json.loads(file.read(size))[name]
        begin, end = said["data_offsets"]
        file.seek(8 + size + begin)
        return np.frombuffer(file.read(end - begin), float8_e4m3fn).reshape(said["shape"])


def reading(folder: str | Path) -> Callable[[Entry], np.ndarray]:
    """A function that reads an entry's tensor of a folder, as it is stored. Raises ModelError at once for
    files that are missing or corrupt."""
    places = {tensor.name: tensor.path for tensor in stored(Path(folder))}

    def read(entry: Entry) -> np.ndarray:
        with safe_open(places[entry.hf_name], "np") as file:
            return file.get_tensor(entry.hf_name)

    return read


def _files(folder: Path) -> dict[Path, set[str]]:
    """The safetensors files, each with the tensor names that the index promises there (none for a single
    file)."""
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: set()}
    if not (folder / INDEX).is_file():
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickles:
            raise ModelError(
                f"{folder} holds {pickles[0]} and no safetensors: a pickle runs code when it is read, "
                f"so it is refused",
                "convert it where you trust it: transformers' model.save_pretrained(folder) "
                "writes safetensors",
            )
        raise ModelError(f"{folder} holds neither {SINGLE} nor {INDEX}",
                         "download the weights, too, or name another folder with --model.path")
    try:
        weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
        named = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ModelError(f"{folder / INDEX} is not a safetensors index: {e!r}", "download it again") from e
    files: dict[Path, set[str]] = {}
    for name, file in named:
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(f"{folder / INDEX}: {file!r} is not a file name of this folder",
                             "download the model again")
        files.setdefault(folder / file, set()).add(name)
    for path in files:
        if not path.is_file():
            raise ModelError(f"{path} is named in {INDEX} and missing",
                             "the download is incomplete: fetch it again")
    return files


def _check_dtype(tensor: Stored) -> None:
    if tensor.dtype not in NAMES.values() and not tensor.name.endswith(".inv_freq"):
        raise ModelError(
            f"{tensor.path}: {tensor.name} is {tensor.dtype}, only BF16, F16 and F32 weights can be trained",
            "start from the unquantised checkpoint",
        )


def _check_shape(entry: Entry, tensor: Stored, folder: Path) -> None:
    if tensor.shape != entry.shape:
        raise ModelError(
            f"{folder}: {entry.hf_name} has shape {list(tensor.shape)}, config.json says {list(entry.shape)}",
            "config.json and the weights belong to different models",
        )


def _check_complete(needed: Sequence[str], seen: set[str], folder: Path) -> None:
    missing = [name for name in needed if name not in seen]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        hint = "does it share the embedding? then set tie_word_embeddings to true in config.json"
        raise ModelError(
            f"{folder}: {len(missing)} of {len(needed)} tensors are missing: {', '.join(missing[:5])}{more}",
            hint if missing == [_TIED]
            else "the checkpoint is incomplete, or config.json belongs to a larger model",
        )


def _write_tensors(folder: Path, cfg: ModelConfig, params: dict[str, Any], dtype: np.dtype,
                   max_shard_bytes: float) -> None:
    for file, shard in plan_shards(folder, cfg, dtype.itemsize, max_shard_bytes).items():
        tensors = {e.hf_name: np.ascontiguousarray(np.asarray(get_param(params, e)).astype(dtype))
                   for e in shard}
        # transformers refuses a file that does not say so
        save_file(tensors, file, metadata={"format": "pt"})


def plan_shards(folder: Path, cfg: ModelConfig, itemsize: int,
                max_shard_bytes: float) -> dict[Path, list[Entry]]:
    """The files of a folder and their tensors; with several files, the folder's index is written."""
    entries = {e.hf_name: e for e in param_table(cfg)}
    sizes = {name: int(np.prod(e.shape)) * itemsize for name, e in entries.items()}
    return {file: [entries[name] for name in shard] for file, shard in shards_of(folder, sizes,
                                                                                 max_shard_bytes).items()}


def shards_of(folder: Path, sizes: dict[str, int], max_shard_bytes: float) -> dict[Path, list[str]]:
    """The same of tensors with these names and sizes in bytes."""
    shards = split(sizes, max_shard_bytes)
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(names, shards) for name in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())},
                                    "weight_map": weight_map})
    return {folder / file: shard for file, shard in zip(names, shards)}


def split(sizes: dict[str, int], limit: float) -> list[list[str]]:
    """Consecutive names whose sizes add up to `limit` at most, unless one alone exceeds it."""
    shards, filled = [[]], 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
