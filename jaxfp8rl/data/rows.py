"""Rows of a JSONL or Parquet file, checked one by one: what is wrong, in which line and field."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from jaxfp8rl.errors import DataError, nearest

Prompt = str | tuple[dict[str, str], ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """One usable row. `line` counts from 1 (Parquet: the row)."""

    line: int
    prompt: Prompt
    answer: str


@dataclasses.dataclass(frozen=True)
class BadRow:
    """One unusable row: where, which field ("" when the row as a whole), and why."""

    file: str
    line: int
    field: str
    why: str

    def __str__(self) -> str:
        field = f'field "{self.field}": ' if self.field else ""
        return f"{self.file}:{self.line}: {field}{self.why}"


def read_rows(path: str, prompt_field: str, answer_field: str) -> tuple[list[Row], list[BadRow]]:
    """Every row of a `.jsonl` or `.parquet` file, as usable and unusable ones, each in file order.

    Raises DataError when the file as a whole cannot be read.
    """
    rows, bad = [], []
    for line, value in _raw_rows(path):
        trouble = value if isinstance(value, BadRow) else _trouble(path, line, value, prompt_field, answer_field)
        if trouble is not None:
            bad.append(trouble)
        else:
            prompt = value[prompt_field]
            rows.append(Row(line, prompt if isinstance(prompt, str) else tuple(prompt), value[answer_field]))
    return rows, bad


def refuse(bad: Sequence[BadRow], total: int) -> None:
    """Raise the DataError that lists the first five bad rows, if there are any."""
    if bad:
        more = f"\n  ... and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise DataError(
            f"{len(bad)} of {total} rows cannot be used:\n  " + "\n  ".join(map(str, bad[:5])) + more,
            "mend the rows, name other fields with task.options.prompt_field and answer_field, or set task.skip_bad_rows = true "
            "to leave such rows out and have them counted",
        )


def _raw_rows(path: str) -> Iterator[tuple[int, Any]]:
    if not os.path.isfile(path):
        raise DataError(f"no such file: {path}", "check task.path; a relative path starts at the working directory")
    if path.endswith(".parquet"):
        return _parquet_rows(path)
    if path.endswith((".jsonl", ".ndjson")):
        return _jsonl_rows(path)
    raise DataError(f"{path}: neither .jsonl nor .parquet", "convert it to one of the two")


def _jsonl_rows(path: str) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as f:
        for line, raw in enumerate(f, 1):
            try:
                yield line, json.loads(raw)
            except (ValueError, RecursionError) as e:
                yield line, BadRow(path, line, "", f"malformed JSON: {e}" if raw.strip() else "blank line")


def _parquet_rows(path: str) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise DataError(f"{path}: reading Parquet needs pyarrow", "pip install pyarrow") from e
    try:
        line = 0
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for value in batch.to_pylist():
                    yield (line := line + 1), value
    except (pyarrow.ArrowException, OSError) as e:
        raise DataError(f"{path}: cannot be read as Parquet after row {line}: {e}", "write the file again") from e


def _trouble(path: str, line: int, row: Any, prompt_field: str, answer_field: str) -> BadRow | None:
    if not isinstance(row, dict):
        return BadRow(path, line, "", f"a row must be an object, this is {_kind(row)}")
    for field in (prompt_field, answer_field):
        if field not in row:
            return BadRow(path, line, field, "missing" + nearest(field, row))
    if why := _prompt_trouble(row[prompt_field]):
        return BadRow(path, line, prompt_field, why)
    answer = row[answer_field]
    if not isinstance(answer, str):
        return BadRow(path, line, answer_field, f"must be a string, this is {_kind(answer)}")
    return None if answer.strip() else BadRow(path, line, answer_field, "empty")


def _prompt_trouble(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt.strip() else "empty"
    if not isinstance(prompt, list):
        return f"must be a string or a list of {{role, content}}, this is {_kind(prompt)}"
    for i, message in enumerate(prompt):
        if not (isinstance(message, dict) and set(message) == {"role", "content"}
                and all(isinstance(v, str) for v in message.values())):
            return f"message {i} must be {{role, content}} with two strings"
    return None if any(m["content"].strip() for m in prompt) else "empty"


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
    return names.get(type(value), "an object" if isinstance(value, dict) else type(value).__name__)
