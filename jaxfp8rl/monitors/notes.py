"""notes.txt, the run's notes with their time, and run.json, the entry of each start of the run."""

from __future__ import annotations

import contextlib
import datetime
import json
from pathlib import Path
from typing import Any

NOTES, ABOUT = "notes.txt", "run.json"


def write_note(folder: Path, text: str) -> None:
    """Add a note. If the disk is full it is lost, but the console has shown it."""
    with contextlib.suppress(OSError), (folder / NOTES).open("a", encoding="utf-8") as notes:
        notes.write(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC  {text}\n")


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts in run.json, oldest first; none if there is no file. Raises ValueError for another
    format."""
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    if not (isinstance(found, list) and all(isinstance(start, dict) for start in found)):
        raise ValueError("it is not a list of starts")
    return found
