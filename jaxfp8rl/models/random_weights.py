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
from typing import BinaryIO

import numpy as np

from jaxfp8rl.errors import ModelError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import Entry, param_table
from jaxfp8rl.models.loading import NAMES, numpy_dtype, plan_shards

STD = 0.02  # the initializer_range of every family
# The standard deviation of the logits. Random layers carry roundings far, and this bounds how far they move a
# log-probability: the start-up gate's limits are for trained models.
LOGITS = 0.25
RESIDUAL = ("o_proj", "down_proj")  # what these give is added to the stream: GPT-2, section 2.3
PART = 2**22  # numbers that one thread draws at a time


def write_random_weights(folder: Path, cfg: ModelConfig, seed: int, max_shard_bytes: float = 5e9) -> None:
    """Write the weights of `cfg`, in its dtype, as shards of `max_shard_bytes` and their index.

    Products and embeddings are drawn from N(0, 0.02), residual outputs with 1/sqrt(2L) of that. Biases are 0
    and norms multiply by 1, but for the last, which keeps logits within N(0, LOGITS). The same seed gives the
    same bytes. It takes some MiB of memory a core, whatever the shape.
    """
    entries = {entry.hf_name: number for number, entry in enumerate(param_table(cfg))}
    workers = len(os.sched_getaffinity(0))
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for path, shard in plan_shards(folder, cfg, numpy_dtype(cfg.dtype).itemsize, max_shard_bytes).items():
            with path.open("wb") as file:
                file.write(_header(shard, cfg.dtype))
                for entry in shard:
                    _write(file, entry, cfg, (seed, entries[entry.hf_name]), pool, workers)


def bytes_of(cfg: ModelConfig) -> int:
    """The bytes of all weights in the model's dtype."""
    return sum(math.prod(e.shape) for e in param_table(cfg)) * numpy_dtype(cfg.dtype).itemsize


def check_room(folder: Path, cfg: ModelConfig) -> None:
    """Raise ModelError if the weights are more than the free space of the disk of `folder`, which need not
    exist yet."""
    place = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    needed, free = bytes_of(cfg), shutil.disk_usage(place).free
    if needed > free:
        raise ModelError(f"{folder}: the weights take {needed / 2**30:.1f} GiB of disk, "
                         f"{free / 2**30:.1f} GiB are free", "make room, or choose another folder or shape")


def _header(shard: list[Entry], dtype: str) -> bytes:
    """The first bytes of a safetensors file (its README, "Format")."""
    sizes = [math.prod(e.shape) * numpy_dtype(dtype).itemsize for e in shard]
    ends = list(itertools.accumulate(sizes, initial=0))
    tensors = {e.hf_name: {"dtype": NAMES[dtype], "shape": list(e.shape), "data_offsets": list(place)}
               for e, place in zip(shard, itertools.pairwise(ends))}
    text = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write(file: BinaryIO, entry: Entry, cfg: ModelConfig, seed: tuple[int, int],
           pool: concurrent.futures.Executor, workers: int) -> None:
    """Write one tensor, as many parts at a time as there are workers."""
    size = math.prod(entry.shape)
    if entry.role.kind in ("norm", "bias"):
        file.write(np.full(size, _constant(entry, cfg), np.float32).astype(numpy_dtype(cfg.dtype)).tobytes())
        return
    depth = (2 * cfg.num_hidden_layers) ** 0.5 if entry.path[-2] in RESIDUAL else 1.0
    draw = functools.partial(_draw, _values(STD / depth, cfg.dtype), seed)
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


def _draw(values: np.ndarray, seed: tuple[int, int], part: tuple[int, int]) -> memoryview:
    """The bytes of one part [size]: each 16 random bits choose one of the 65,536 `values`."""
    number, size = part
    bits = np.random.SFC64(np.random.SeedSequence((*seed, number))).random_raw(-(-size // 4))
    return np.take(values, bits.view(np.uint16)[:size]).view(np.uint8).data


@functools.cache
def _values(std: float, dtype: str) -> np.ndarray:
    """65,536 equally likely values of N(0, std), [65536] in `dtype`."""
    at = statistics.NormalDist(0.0, std).inv_cdf
    return np.array([at((i + 0.5) / 2**16) for i in range(2**16)]).astype(numpy_dtype(dtype))
