"""TensorBoard event files, written by tensorboardX. It needs no TensorFlow, but loads torch if installed.

Its SummaryWriter is not used, because it writes in a thread that ends at the first error, after which every
caller of `log` waits for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from jaxfp8rl.monitors.base import Record


class TensorboardMonitor:
    """Writes every number of a record as a scalar under its key. Text is only in metrics.jsonl."""

    def __init__(self, folder: str | Path):
        from tensorboardX.event_file_writer import EventsWriter

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        number = f".{len(list(folder.iterdir()))}"  # keeps two files of the same second apart
        self._writer = EventsWriter(str(folder / "events"), number)

    def log(self, record: Record) -> None:
        """Write a record. Raises OSError if the disk fails."""
        from tensorboardX.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        numbers = {key: float(value) for key, value in record.items() if key != "step"
                   and not isinstance(value, str)}
        values = [Summary.Value(tag=key, simple_value=value) for key, value in numbers.items()]
        self._writer.write_event(Event(wall_time=time.time(), step=int(record["step"]),
                                       summary=Summary(value=values)))
        self._writer.flush()

    def rewind(self, step: int, records: Iterable[Record]) -> None:
        """Hide the steps after `step` that were logged before. TensorBoard does so at the start of a session,
        which tf.summary and torch write for `purge_step`."""
        from tensorboardX.proto.event_pb2 import (  # protobuf makes these classes as it is loaded
            Event,  # pyright: ignore[reportAttributeAccessIssue]
            SessionLog,  # pyright: ignore[reportAttributeAccessIssue]
        )
        start = SessionLog(status=SessionLog.START)
        self._writer.write_event(Event(wall_time=time.time(), step=step + 1, session_log=start))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
