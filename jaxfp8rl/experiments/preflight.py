"""The checks of an experiment's cells that need no device: model, shapes, tokenizer, data, scorer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import UserError
from jaxfp8rl.experiments.cells import Cell, name_of
from jaxfp8rl.models.config import how_to_get
from jaxfp8rl.models.known import awaited, known_shape
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.training.context import open_rewards
from jaxfp8rl.training.preflight import check_shape, preflight
from jaxfp8rl.training.warm_start import check_demonstrations


def check_data(cells: Sequence[Cell]) -> list[str]:
    """Make a run's own checks of every cell -> lines about what was checked. Raises the UserErrors of a run,
    with the cell's arm. Tokenizer and data are checked once for cells that share them."""
    checked, said = dict[str, str](), list[str]()
    for cell in {name_of(cell.arm): cell for cell in cells}.values():
        try:
            _check(cell.warm or cell.cfg, cell.cfg, checked)
        except UserError as e:
            raise type(e)(f"arm {name_of(cell.arm)}: {e.message}", e.next_step) from e
    said += dict.fromkeys(checked.values())
    return said


def _check(first: Config, cfg: Config, checked: dict[str, str]) -> None:
    """first: the config that loads the model."""
    missing = awaited(first.model.path)
    check_shape(cfg, model_config(cfg, known_shape(cfg.model.path) if missing else None))
    stops = cfg.rollout.max_new_tokens, cfg.rollout.stop, cfg.rollout.stop_token_ids
    key = repr((cfg.model, cfg.task, stops))
    if key in checked:
        return
    if missing:
        path = Path(cfg.model.path)
        checked[key] = (f"{path} does not exist yet, and the cells need it: the tokenizer and the data were "
                        f"not checked\n  next step: {how_to_get(path)}")
        return
    data = preflight(cfg, fresh=True)
    if first.sft.steps:
        check_demonstrations(first, data)
    open_rewards(cfg, data.task, workers=1).close()
    checked[key] = _told(cfg, len(data.train), len(data.held_out))


def _told(cfg: Config, train: int, held_out: int) -> str:
    of: Any = cfg.task.name or Path(cfg.task.path).name or cfg.task.kind
    return f"{of}: {train:,} problems and {held_out:,} held out, tokenizer and scorer checked"
