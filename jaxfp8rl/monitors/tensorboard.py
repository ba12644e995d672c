"""TensorBoard event files, written by tensorboardX: no TensorFlow, though it loads torch where torch is installed."""

from __future__ import annotations

from pathlib import Path

from jaxfp8rl.errors import UserError
from jaxfp8rl.monitors.base import Record


class TensorboardMonitor:
    """Every number of a record becomes a scalar under its key; texts are left to metrics.jsonl."""

    def __init__(self, folder: str | Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as e:
            raise UserError('run.trackers: "tensorboard" needs the package tensorboardX',
                            'pip install "jaxfp8rl[trackers]", or run.trackers = []') from e  # fmt: skip
        self._writer = SummaryWriter(str(folder))

    def log(self, record: Record) -> None:
        step = int(record["step"])
        for key, value in record.items():
            if key != "step" and not isinstance(value, str):
                self._writer.add_scalar(key, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
