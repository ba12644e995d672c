"""eval.json: every evaluation of a run, as `jaxfp8rl eval` writes it and `jaxfp8rl report` shows it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Its records, the newest last. Raises ValueError for what `jaxfp8rl eval` has not written."""
    found = json.loads(path.read_text(encoding="utf-8"))
    found = found if isinstance(found, list) else [found]  # as older versions wrote it
    for n, record in enumerate(found, 1):
        if not (isinstance(record, dict) and {"step", "problems", "samples"} <= record.keys()
                and _estimates(record)):
            raise ValueError(f"record {n} is not of `jaxfp8rl eval`")
    return found


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """The file for this process alone, where the disk has locks. Its .lock stays: were it removed, who waits
    for it would get the removed one's lock, and who comes later that of a new one."""
    with path.with_name(path.name + ".lock").open("a") as file:
        with contextlib.suppress(OSError):  # some network file systems have none
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_evaluations(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """A key a line; whole or not at all."""
    draft = path.with_name(path.name + ".tmp")
    lines = (",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in record.items())
             for record in records)
    draft.write_text("[\n" + ",\n".join(f"{{\n{record}\n}}" for record in lines) + "\n]\n", encoding="utf-8")
    os.replace(draft, path)


def forget_after(path: Path, step: int) -> None:
    """Drop the evaluations of later checkpoints: the run goes on from `step` to others. Raises as
    `read_evaluations`."""
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
