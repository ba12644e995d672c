"""The folder from which vLLM reads a base in four bits, if lora.base makes it of floats."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bridges.api import WeightSource
from jaxfp8rl.config.schema import Config
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import reading, write_json
from jaxfp8rl.publish.packed import PackedCheckpoint


@contextlib.contextmanager
def four_bits_folder(cfg: Config, model: ModelConfig,
                     write: Callable[[WeightSource, Path, int], str]) -> Iterator[str | None]:
    """model.path if its weights are in four bits, and None for a model that has none. What lora.base makes is
    written into the run directory, and deleted when the context ends: vLLM reads it once. write: see
    `jaxfp8rl.rollout.engines.write_weights`, whose BridgeError is raised if the disk is too small."""
    if not model.packed or model.packed.stored:
        yield cfg.model.path if model.packed else None
        return
    run = Path(cfg.run.dir)
    run.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".base-", dir=run) as parent:
        folder = Path(parent) / "model"
        write(PackedCheckpoint(model, reading(cfg.model.path)), folder, 0)
        write_json(folder / "config.json", model.to_hf())
        yield str(folder)
