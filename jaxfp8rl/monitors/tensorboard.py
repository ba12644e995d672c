"""TensorBoard event files, written by tensorboardX: no TensorFlow, though it loads torch where torch is
installed.

Not by its SummaryWriter: that writes in a thread, which ends at the first error, and then whoever logs waits
for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from jaxfp8rl.monitors.base import Record


class TensorboardMonitor:
    """Every number of a record becomes a scalar under its key; texts are left to metrics.jsonl."""

    def __init__(self, folder: str | Path):
        from tensorboardX.event_file_writer import EventsWriter

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        number = f".{len(list(folder.iterdir()))}"  # of two files of one second, which would be one
        self._writer = EventsWriter(str(folder / "events"), number)

    def log(self, record: Record) -> None:
        """Raises OSError of the disk."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        numbers = {key: float(value) for key, value in record.items() if key != "step"
                   and not isinstance(value, str)}
        values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._writer.write_event(Event(wall_time=time.time(), step=int(record["step"]),
                                       summary=Summary(value=values)))
        self._writer.flush()

    def rewind(self, step: int, records: Iterable[Record]) -> None:
        """What is logged from here on comes after `step`: TensorBoard shows nothing of the steps after it
        that was logged before (a session that starts, as tf.summary and torch write it for `purge_step`)."""
        from tensorboardX.proto.event_pb2 import (  # protobuf makes these classes as it is loaded
            Event,  # pyright: ignore[reportAttributeAccessIssue]
            SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
        )
        start = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=step + 1, session_log=start))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
