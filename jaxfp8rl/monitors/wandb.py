"""Weights & Biases. Project, entity, offline mode and the key are its own environment's: WANDB_PROJECT, WANDB_MODE, ..."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxfp8rl.monitors.base import Record


class WandbMonitor:
    """A run of its own for each run directory, which a resumed run goes on with: its name is kept in `folder`/wandb-id.

    Every record is logged whole, over its own "step", so that steps taken again after a resume are shown where they belong.
    """

    def __init__(self, folder: str | Path, config: Mapping[str, Any]):
        import wandb

        folder = Path(folder)
        kept = folder / "wandb-id"
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxfp8rl"), name=os.environ.get("WANDB_NAME", folder.resolve().name),
            id=kept.read_text(), resume="allow", dir=folder, config=dict(config),
            settings=wandb.Settings(console="off", silent=True),  # the console is the run's own
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Record) -> None:
        self._run.log(dict(record))

    def close(self) -> None:
        self._run.finish()
