"""Random weights of a shape as safetensors, written tensor by tensor: a model that takes the time and memory
of a published one, without a download."""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import json
import math
import os
import shutil
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn

from jaxfp8rl.errors import ModelError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import Entry, is_packed, param_table
from jaxfp8rl.models.loading import NAMES, numpy_dtype, shards_of
from jaxfp8rl.models.packed import STORED, Part, parts_of

STD = 0.02  # the initializer_range of every family
# The standard deviation of the logits. Random layers carry roundings far, and this bounds how far they move a
# log-probability: the start-up gate's limits are for trained models.
LOGITS = 0.25
RESIDUAL = ("o_proj", "down_proj")  # what these give is added to the stream: GPT-2, section 2.3
CODES = {"nvfp4": 2.926, "mxfp4": 2.926, "int4": 4.637}  # the RMS of random codes: E2M1, and -8 to 7
SPREAD = 0.8, 0.9, 1.0, 1.1  # scales beside their mean
DIVISOR = 2.0**14  # of NVFP4: scales near 112, in the middle of E4M3's range
_ITEMSIZES = {"uint8": 1, "float8_e4m3fn": 1, "bfloat16": 2, "float16": 2, "int64": 8}
PART = 2**22  # numbers that one thread draws at a time


class Tensor(NamedTuple):
    """A tensor of the folder. part: of a weight in four bits (jaxfp8rl.models.packed), None for all others.
    seed: beside the folder's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    entry: Entry
    part: Part | None
    seed: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEMSIZES.get(self.dtype, 4)


def write_random_weights(folder: Path, cfg: ModelConfig, seed: int, max_shard_bytes: float = 5e9) -> None:
    """Write the weights of `cfg`, in its dtype, as shards of `max_shard_bytes` and their index.

    Products and embeddings are drawn from N(0, 0.02), residual outputs with 1/sqrt(2L) of that. Biases are 0
    and norms multiply by 1, but for the last, which keeps logits within N(0, LOGITS). Weights in four bits
    are random codes with scales that give them the same standard deviation. The same seed gives the same
    bytes. It takes some MiB of memory a core, whatever the shape.
    """
    tensors = {tensor.name: tensor for tensor in tensors_of(cfg)}
    sizes, workers = {name: t.nbytes for name, t in tensors.items()}, len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for path, names in shards_of(folder, sizes, max_shard_bytes).items():
            with path.open("wb") as file:
                file.write(_header([tensors[name] for name in names]))
                for name in names:
                    _write(file, tensors[name], cfg, seed, pool, workers)


def tensors_of(cfg: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of the folder, in order."""
    for number, e in enumerate(param_table(cfg)):
        if cfg.packed and is_packed(e, cfg):
            for i, part in enumerate(parts_of(e, cfg.packed.form)):
                yield Tensor(part.name, part.dtype, part.shape, e, part, (number, i))
        else:
            yield Tensor(e.hf_name, cfg.dtype, e.shape, e, None, (number,))


def bytes_of(cfg: ModelConfig) -> int:
    """The bytes of all weights as they are stored."""
    return sum(tensor.nbytes for tensor in tensors_of(cfg))


def check_room(folder: Path, cfg: ModelConfig) -> None:
    """Raise ModelError if the weights are more than the free space of the disk of `folder`, which need not
    exist yet."""
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    needed, free = bytes_of(cfg), shutil.disk_usage(place).free
    if needed > free:
        raise ModelError(f"{folder}: the weights take {needed / 2**30:.1f} GiB of disk, "
                         f"{free / 2**30:.1f} GiB are free", "make room, or choose another folder or shape")


def _header(shard: list[Tensor]) -> bytes:
    """The first bytes of a safetensors file (its README, "Format")."""
    ends = list(itertools.accumulate((t.nbytes for t in shard), initial=0))
    tensors = {t.name: {"dtype": (NAMES | STORED)[t.dtype], "shape": list(t.shape),
                        "data_offsets": list(place)}
               for t, place in zip(shard, itertools.pairwise(ends))}
    text = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, tensor: Tensor, cfg: ModelConfig, seed: int,
           pool: concurrent.futures.Executor, workers: int) -> None:
    """Write one tensor, as many parts at a time as there are workers."""
    entry, size = tensor.entry, math.prod(tensor.shape)
    depth = (2 * cfg.num_hidden_layers) ** 0.5 if entry.path[-2] in RESIDUAL else 1.0
    if tensor.part:
        assert cfg.packed
        if not tensor.part.field:
            file.write(np.array(entry.shape, np.int64).tobytes())
            return
        values = _packed_values(cfg.packed.form, tensor.part.field, STD / depth)
        size = tensor.nbytes // values.itemsize
    elif entry.role.kind in ("norm", "bias"):
        file.write(np.full(size, _constant(entry, cfg), np.float32).astype(numpy_dtype(cfg.dtype)).tobytes())
        return
    else:
        values = _values(STD / depth, cfg.dtype)
    draw = functools.partial(_draw, values, (seed, *tensor.seed))
    for parts in itertools.batched(_parts(size), workers):
        for numbers in pool.map(draw, parts):
            file.write(numbers)


def _constant(entry: Entry, cfg: ModelConfig) -> float:
    """The value of every number of a norm or a bias."""
    if entry.role.kind == "bias":
        return 0.0
    is_last = entry.path == ("norm", "weight")
    scale = min(1.0, LOGITS / (STD * cfg.hidden_size**0.5)) if is_last else 1.0
    return scale - cfg.family.unit_offset


def _parts(size: int) -> Iterator[tuple[int, int]]:
    """(number, size) of each part of a tensor."""
    yield from enumerate(min(PART, size - start) for start in range(0, size, PART))


def _draw(values: np.ndarray, seed: tuple[int, ...], part: tuple[int, int]) -> memoryview:
    """The bytes of one part [size]: each 16 random bits choose one of the 65,536 `values`."""
    number, size = part
    bits = np.random.SFC64(np.random.SeedSequence((*seed, number))).random_raw(-(-size // 4))
    return np.take(values, bits.view(np.uint16)[:size]).view(np.uint8).data


@functools.cache
def _values(std: float, dtype: str) -> np.ndarray:
    """65,536 equally likely values of N(0, std), [65536] in `dtype`."""
    at = statistics.NormalDist(0.0, std).inv_cdf
    return np.array([at((i + 0.5) / 2**16) for i in range(2**16)]).astype(numpy_dtype(dtype))


@functools.cache
def _packed_values(form: str, field: str, std: float) -> np.ndarray:
    """65,536 equally likely values of a part of weights in four bits: two bytes of codes, a scale, or the one
    divisor."""
    scale = std / CODES[form]
    if field == "packed":
        return np.arange(2**16, dtype=np.uint16)
    if field == "global_scale":
        return np.full(2**16, DIVISOR, np.float32)
    if form == "mxfp4":
        return np.full(2**16, 127 + round(math.log2(scale)), np.uint8)
    kind = float8_e4m3fn if form == "nvfp4" else bfloat16
    return np.resize(np.array(SPREAD) * scale * (DIVISOR if form == "nvfp4" else 1), 2**16).astype(kind)
