"""Reading of a run's config and the masters of one of its checkpoints, without disturbing a run in progress.

A config stands for a run that has not begun: the weights that it starts from, at step 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jaxfp8rl.checkpoint.base_model import check_base_model, with_base_model
from jaxfp8rl.checkpoint.store import Checkpoints, damage, loop_of, unlike
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.distributed.mesh import ONE, MeshLayout, make_mesh_layout
from jaxfp8rl.errors import CheckpointError, ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.optim.low_bit import decode, encode, is_scaled
from jaxfp8rl.policy.adapters import masters_like, starting_masters
from jaxfp8rl.policy.initial import starting_params
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.rollout.gpu_memory import share_gpu
from jaxfp8rl.types import Params


@dataclasses.dataclass(frozen=True)
class Trained:
    """`params`: the masters, decoded, with one stack of layers. `loop`: the loop's own state, {} before step
    1."""

    cfg: Config
    model: ModelConfig
    params: Params
    loop: dict[str, Any]
    step: int


def load_trained(source: str, step: int | None = None, overrides: Sequence[str] = ()) -> Trained:
    """The newest checkpoint of the run directory `source`, or that of `step`; or the starting weights of a
    config. The masters lie as the run's learner has them, if this process has as many devices: on one, those
    of a large model would not fit.

    Raises the errors of `config_of`, and CheckpointError for a step that the run has not kept.
    """
    return read_trained(config_of(source, step, overrides), source, step)


def read_trained(cfg: Config, source: str, step: int | None = None) -> Trained:
    """The same by the config that `config_of` has found; other settings may have been changed since that
    leave the weights as they are."""
    folder = Path(source)
    share_gpu(cfg)  # before anything asks JAX for its devices
    model, layout = model_config(cfg), _layout_of(cfg)
    if not folder.is_dir():
        params = starting_masters(cfg, model, lambda: starting_params(cfg, model, layout))
        return Trained(cfg, model, params, {}, 0)
    step = _sound_step(folder / "checkpoints", step)
    return Trained(cfg, model, *_read(folder / "checkpoints" / str(step), cfg, model, layout), step)


def config_of(source: str, step: int | None = None, overrides: Sequence[str] = ()) -> Config:
    """The config of a run directory, with the base model that the run has kept, or of a file or preset.
    Raises ConfigError for a `source` that is neither, and for a `step` of a config."""
    folder = Path(source)
    is_run = folder.is_dir()
    if is_run and not (folder / "config.toml").is_file():
        warm = folder / "sft"
        raise ConfigError(f"{folder} holds no config.toml: it is no run directory",
                          f"`jaxfp8rl sft` wrote {warm}, a model: name that as model.path"
                          if (warm / "config.json").is_file() else "give what run.dir was")
    if step and not is_run:
        raise ConfigError(f"--step {step}: {source} is a config, which has no checkpoints",
                          "name a run directory")
    cfg = load_config(str(folder / "config.toml") if is_run else source, overrides)
    if is_run:
        cfg = with_base_model(cfg, folder)
        check_base_model(cfg, folder)
    return cfg


def _layout_of(cfg: Config) -> MeshLayout:
    t = cfg.train
    return make_mesh_layout(t.data, t.fsdp, t.tensor) if t.devices <= jax.local_device_count() else ONE


def _sound_step(folder: Path, step: int | None) -> int:
    """The newest step, or `step` if it was kept. Raises CheckpointError, also if the files are not as they
    were written."""
    checkpoints = Checkpoints(folder, keep=1)
    step = checkpoints.kept(step, "--step ")
    if problem := damage(folder / str(step)):
        others = " or ".join(f"--step {s}" for s in checkpoints.steps() if s != step)
        raise CheckpointError(f"{folder}: checkpoint {step} is damaged: {problem}", others)
    return step


def _read(folder: Path, cfg: Config, model: ModelConfig,
          layout: MeshLayout) -> tuple[Params, dict[str, Any]]:
    """(masters, the loop's state) of a checkpoint; the optimiser's state stays on the disk."""
    fresh = jax.eval_shape(lambda params: jax.tree.map(lambda p: encode(p, cfg.optim.master), params),
                           masters_like(cfg, model))
    like = layout.placed_shapes(fresh)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        with context:
            saved = ocp.load_checkpointables(str(folder.absolute()), {"state": {"params": like}})
    except Exception as e:  # Orbax's are of many kinds
        if not folder.is_dir():
            raise CheckpointError(f"{folder} has been deleted meanwhile: the run keeps fewer checkpoints",
                                  "try again, or set run.keep_checkpoints higher") from e
        raise CheckpointError(
            f"{folder} cannot be read as the run's config.toml says: {unlike(folder, {'params': like}, e)}",
            "restore the run's own config.toml") from e
    numbers = lambda p: decode(p) if is_scaled(p) else p
    return jax.tree.map(numbers, saved["state"]["params"], is_leaf=is_scaled), loop_of(folder.absolute())
