"""notes.txt of a run directory: what the run had to say, with the time."""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path

NOTES = "notes.txt"


def write_note(folder: Path, text: str) -> None:
    """Add a note. A full disk loses it: the console has said it."""
    with contextlib.suppress(OSError), (folder / NOTES).open("a", encoding="utf-8") as notes:
        notes.write(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC  {text}\n")
