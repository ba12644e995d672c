"""Weights & Biases. Its own environment variables set project, entity, offline mode and key: WANDB_PROJECT,
WANDB_MODE, ..."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxfp8rl.monitors.base import Record


class WandbMonitor:
    """One W&B run for each run directory; its id is kept in `folder`/wandb-id, so that a resumed run
    continues it. W&B cannot delete steps, so a run that goes back to an earlier step starts a new W&B run
    with the records up to that step."""

    def __init__(self, folder: str | Path, config: Mapping[str, Any]):
        self._folder, self._config = Path(folder), dict(config)
        self._begin()

    def _begin(self) -> None:
        import wandb

        kept = self._folder / "wandb-id"
        if not kept.exists():
            kept.write_text(uuid.uuid4().hex[:8])
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxfp8rl"),
            name=os.environ.get("WANDB_NAME", self._folder.resolve().name),
            id=kept.read_text(), resume="allow", dir=self._folder, config=self._config,
            settings=wandb.Settings(console="off", silent=True),  # the run has a console of its own
        )
        self._run.define_metric("*", step_metric="step")

    def log(self, record: Record) -> None:
        self._run.log(dict(record))

    def rewind(self, step: int, records: Iterable[Record]) -> None:
        """`records`: those up to `step`."""
        self.close()
        (self._folder / "wandb-id").unlink()
        self._begin()
        for record in records:
            self.log(record)

    def close(self) -> None:
        self._run.finish()
