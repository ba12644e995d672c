"""One JSON object a line, flushed at once: metrics.jsonl, and samples.jsonl.

JSON has no NaN and no infinity, so a non-finite float is written as the string "nan", "inf" or "-inf", which
Python's `float` reads back: every line stays valid JSON for every reader. `read_metrics` turns them into
floats again.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_NON_FINITE = {"nan", "inf", "-inf"}
_LONE = "backslashreplace"  # writes half a surrogate pair, which cannot be encoded, as its JSON escape


class JsonlMonitor:
    """Appends records to `path` and creates its folder. Records of samples may hold text and nested JSON
    values."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a", encoding="utf-8", errors=_LONE)

    def log(self, record: Mapping[str, Any]) -> None:
        """Write one line. Values of numpy and JAX are converted to Python values."""
        self._file.write(json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Delete the lines of steps after `step`, and a line cut short by a crash."""
        self._file.close()
        kept = [line for line in whole_lines(self.path) if json.loads(line)["step"] <= step]
        draft = self.path.with_name(self.path.name + ".tmp")
        draft.write_text("".join(kept), encoding="utf-8", errors=_LONE)
        os.replace(draft, self.path)
        self._file = self.path.open("a", encoding="utf-8", errors=_LONE)

    def close(self) -> None:
        self._file.close()


def read_metrics(path: str | Path) -> list[dict[str, float | int | str]]:
    """The records of metrics.jsonl, with non-finite floats restored. A last line cut short by a crash is left
    out. Raises ValueError, which names the line, for a line that is not a record of a step."""
    return [_record(n, line) for n, line in enumerate(whole_lines(Path(path)), 1)]


def _record(n: int, line: str) -> dict[str, float | int | str]:
    try:
        record = json.loads(line)
    except ValueError as e:
        raise ValueError(f"line {n}: {e}") from e
    if not (isinstance(record, dict) and type(record.get("step")) is int):
        raise ValueError(f"line {n} is not a record of a step: {line[:80].rstrip()}")
    return {k: _restored(v) for k, v in record.items()}


def whole_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from (line for line in file if line.endswith("\n"))


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _restored(value: Any) -> Any:
    return float(value) if isinstance(value, str) and value in _NON_FINITE else value
