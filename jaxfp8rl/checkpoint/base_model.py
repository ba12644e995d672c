"""The small files of the model that a run began with, in `base_model/` of the run directory.

A checkpoint has all parameters. With config.json and the tokenizer beside it, a run can be resumed, evaluated
and exported after the folder that it began from has been moved or deleted.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.tokenizer import CHARS_PREFIX
from jaxfp8rl.errors import CheckpointError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import TOKENIZER_FILES

FOLDER = "base_model"
NEEDED = {"path": "config.json", "tokenizer": "tokenizer.json"}  # the file that each folder must have


def keep_base_model(cfg: Config, run: Path) -> None:
    """Copy the small files of model.path and model.tokenizer into the run directory."""
    for key, source in _folders(cfg).items():
        target = run / FOLDER / key
        target.mkdir(parents=True, exist_ok=True)
        for file in (source / name for name in ("config.json", *TOKENIZER_FILES)):
            if file.is_file():
                shutil.copyfile(file, target / file.name)


def with_base_model(cfg: Config, run: str | Path) -> Config:
    """`cfg` with the run's own copies in place of original folders that no longer exist. Prints each
    replacement. Raises CheckpointError for the base of adapters, of whose weights there is no copy."""
    own, gone = Path(run) / "config.toml", {}
    begun = load_config(str(own)) if own.is_file() else cfg
    for key, folder in _folders(cfg).items():
        copy = Path(run) / FOLDER / key
        if not (folder / NEEDED[key]).is_file() and (copy / NEEDED[key]).is_file() and folder == _folders(
                begun).get(key):
            if key == "path" and cfg.lora.rank:
                raise CheckpointError(f"model.path: {folder} is gone, and a checkpoint of adapters has no "
                                      "weights of their base",
                                      "name a folder with the same weights: --model.path FOLDER")
            print(f"model.{key}: {folder} is gone; using the copies in {copy}")
            gone[key] = str(copy)
    return cfg.model_copy(update={"model": cfg.model.model_copy(update=gone)}) if gone else cfg


def check_base_model(cfg: Config, run: str | Path) -> None:
    """Raise CheckpointError if model.path is another model than the run began with: it may differ in rope,
    norms and the like, which no checkpoint has. Prints a note if an earlier version has kept no copy to
    compare with."""
    own = Path(run) / "config.toml"
    if not (cfg.model.path and own.is_file()):
        return
    before = load_config(str(own)).model.path
    known = next((p for p in (Path(run) / FOLDER / "path", Path(before)) if before
                  and (p / NEEDED["path"]).is_file()), None)
    if known is None:
        print(
            f"model.path: nothing is left to compare {cfg.model.path} with but the shapes of the checkpoint")
        return
    was, now = (dataclasses.asdict(ModelConfig.from_hf(Path(folder))) for folder in (known, cfg.model.path))
    names = sorted(name for name in was.keys() - {"dtype", "extra"} if was[name] != now[name])
    if differ := [f"{name}: {was[name]!r} -> {now[name]!r}" for name in names]:
        raise CheckpointError(
            f"model.path: {cfg.model.path} is another model than the run began with: {'; '.join(differ)}",
            f"name the folder that is the same one; {known} has its config.json")


def _folders(cfg: Config) -> dict[str, Path]:
    """The folder that each key of [model] names."""
    named = {key: getattr(cfg.model, key) for key in NEEDED}
    return {key: Path(name) for key, name in named.items() if name and not name.startswith(CHARS_PREFIX)}
