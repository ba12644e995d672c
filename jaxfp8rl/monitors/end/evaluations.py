"""eval.json: the evaluations of a run, which `jaxfp8rl eval` writes and `jaxfp8rl report` shows."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """The records of the file, the newest last. Raises ValueError if `jaxfp8rl eval` did not write it."""
    found = json.loads(path.read_text(encoding="utf-8"))
    found = found if isinstance(found, list) else [found]  # older versions wrote a single record
    for n, record in enumerate(found, 1):
        if not (isinstance(record, dict) and {"step", "problems", "samples"} <= record.keys()
                and _estimates(record)):
            raise ValueError(f"record {n} is not of `jaxfp8rl eval`")
    return found


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the file `path` while entered, if the disk has locks.

    The .lock file is never removed: a process waiting for it would get the lock of the removed file, and a
    later process the lock of a new one.
    """
    with path.with_name(path.name + ".lock").open("a") as file:
        with contextlib.suppress(OSError):  # some network file systems have none
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_evaluations(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write the records atomically, one key a line."""
    draft = path.with_name(path.name + ".tmp")
    lines = (",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
             for record in records)
    draft.write_text("[\n" + ",\n".join(f"{{\n{record}\n}}" for record in lines) + "\n]\n", encoding="utf-8")
    os.replace(draft, path)


def forget_after(path: Path, step: int) -> None:
    """Delete the evaluations of checkpoints after `step`, because the run goes back to `step`. Raises
    ValueError as `read_evaluations` does."""
    if path.is_file():
        with locked(path):
            records = read_evaluations(path)
            kept = [record for record in records if record["step"] <= step]
            if len(kept) < len(records):
                write_evaluations(path, kept)


def _estimates(record: Mapping[str, Any]) -> bool:
    found = record.get("pass_at_k")
    whole = lambda x: isinstance(x, dict) and {"estimate", "low", "high"} <= x.keys()
    return isinstance(found, dict) and all(map(whole, found.values()))
