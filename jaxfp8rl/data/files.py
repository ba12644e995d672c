"""Finds the data files that a path names, and reads their rows one by one, unchecked."""

from __future__ import annotations

import bz2
import csv
import dataclasses
import functools
import glob
import gzip
import io
import json
import lzma
import os
import re
import sys
import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import IO, Any

from jaxfp8rl.errors import DataError, nearest

COMPRESSED = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
KINDS = ".jsonl, .json, .csv, .tsv (each also with .gz, .bz2 or .xz) and .parquet"
# these describe a data set and contain no rows
OF_HUB = {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json"}
SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test", "eval": "test",
          "validation": "validation",
          "valid": "validation", "val": "validation", "dev": "validation"}


@dataclasses.dataclass(frozen=True)
class BadRow:
    """One unusable row: its position, the field ("" for the row as a whole), and the reason."""

    file: str
    line: int
    field: str
    why: str

    def __str__(self) -> str:
        field = f'field "{self.field}": ' if self.field else ""
        return f"{self.file}:{self.line}: {field}{self.why}"


class Written(float):
    """A JSON number that keeps its spelling: an answer of 2.50 is not rewritten as 2.5."""

    text: str

    def __new__(cls, text: str):
        self = super().__new__(cls, text)
        self.text = text
        return self


def data_files(path: str) -> list[str]:
    """The data files that a file, a folder or a glob names, sorted by name.

    Raises DataError if there are none, or if they differ in format, in split or, for a folder, in subfolder.
    """
    whole = os.path.expanduser(path)
    if os.path.isdir(whole):
        found = [os.path.join(place, name) for place, _, names in os.walk(whole) for name in names]
    elif os.path.exists(whole):
        if not _kind_of(whole):
            raise DataError(f"{whole}: not one of {KINDS}", "convert it to one of these")
        return [whole]
    elif glob.has_magic(whole):
        found = [name for name in glob.glob(whole, recursive=True) if os.path.isfile(name)]
    else:
        raise DataError(f"no such file: {whole}{_neighbour(whole)}",
                        "check task.path; a relative path starts at the working directory")
    root = whole if os.path.isdir(whole) else os.path.dirname(re.split(r"[*?\[]", whole)[0])
    rows = sorted(name for name in found if _kind_of(name)
                  and not _is_aside(os.path.relpath(name, root or ".")))
    if not rows:
        raise DataError(f"{whole}: no file of rows ({KINDS}) among {len(found)} files", "check task.path")
    _check_alike(whole, root or ".", rows)
    return rows


def raw_rows(path: str, columns: Collection[str] | None = None) -> Iterator[tuple[int, Any]]:
    """(line, value) of every row; the value is a BadRow if the row is malformed. Lines count from 1. In a
    file without lines of rows (Parquet, a JSON list) the number is that of the row. `columns`: the columns to
    read from a Parquet file.

    Raises DataError if the file as a whole cannot be read.
    """
    line, reader = 0, READERS[_kind_of(path)]
    try:
        for line, value in reader(path, columns) if reader is _parquet else reader(path):
            yield line, value
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as e:
        raise DataError(f"{path}: cannot be read after row {line}: {e}", "download or write it again") from e


def _kind_of(path: str) -> str:
    """".jsonl" for rows.jsonl.gz; "" for a file without rows."""
    name, last = os.path.splitext(path.lower())
    suffix = os.path.splitext(name)[1] if last in COMPRESSED else last
    return suffix if suffix in READERS and (last == suffix or suffix != ".parquet") else ""


def _is_aside(name: str) -> bool:
    return os.path.basename(name) in OF_HUB or any(part.startswith(".") for part in name.split(os.sep)
                                                   if part != "..")


def _neighbour(path: str) -> str:
    folder = os.path.dirname(path) or "."
    names = [name for name in os.listdir(folder) if not name.startswith(".")] if os.path.isdir(folder) else []
    return nearest(os.path.basename(path), names) if 0 < len(names) <= 20 else ""


def _check_alike(path: str, root: str, files: Sequence[str]) -> None:
    """Raise DataError if the files seem to belong to several data sets: nobody should have to guess which to
    train on."""

    def split(name: str) -> str:
        words = re.split("[^a-z]+", os.path.relpath(name, root).lower())
        return " and ".join(sorted({SPLITS[w] for w in words if w in SPLITS})) or "no split"

    if groups := _differing(files, split):
        raise DataError(f"{path}: files of several splits: {groups}",
                        "name those of one split; task.held_out_path names others to evaluate on")
    if groups := _differing(files, _kind_of):
        raise DataError(f"{path}: files of several kinds: {groups}", "name those of one kind")
    if os.path.isdir(path) and (
            groups := _differing(files, lambda name: os.path.relpath(os.path.dirname(name), root))):
        raise DataError(f"{path}: files in several folders: {groups}",
                        f"name one of them, or all: {os.path.join(path, '**', '*')}")


def _differing(files: Sequence[str], of) -> str:
    """The groups of files that differ, with a glob for each; "" if there is one group."""
    groups: dict[str, list[str]] = {}
    for name in files:
        groups.setdefault(of(name), []).append(name)
    globs = {key: names[0] if len(names) == 1 else os.path.commonprefix(names) + "*"
             for key, names in groups.items()}
    return ", ".join(f"{key} ({pattern})" for key, pattern in globs.items()) if len(groups) > 1 else ""


def _open(path: str) -> IO[bytes]:
    return COMPRESSED.get(os.path.splitext(path.lower())[1], open)(path, "rb")


_DECODER = json.JSONDecoder(parse_float=Written)


def _parse(raw: bytes) -> Any:
    return _DECODER.decode(raw.decode(json.detect_encoding(raw)))


def _json_lines(path: str) -> Iterator[tuple[int, Any]]:
    with _open(path) as f:
        yield from _lines(path, f)


def _lines(path: str, file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    for line, raw in enumerate(file, 1):
        try:
            yield line, _parse(raw)
        except (ValueError, RecursionError) as e:
            yield line, BadRow(path, line, "", _malformed(e, raw) if raw.strip() else "blank line")


def _malformed(e: Exception, raw: bytes) -> str:
    """Why a line is not JSON. The decoder counts lines from this one, which the reader knows already."""
    if not isinstance(e, json.JSONDecodeError):
        return f"malformed JSON: {e}"
    column = min(e.pos, len(e.doc.rstrip())) + 1
    return f"malformed JSON: {e.msg} at column {column} of {len(e.doc.rstrip())}"


def _json(path: str) -> Iterator[tuple[int, Any]]:
    """A list of rows; an object whose "data" (or whose only value) is such a list; or JSON Lines, which often
    have the extension .json."""
    with _open(path) as f:
        raw = f.read()
    try:
        value = _parse(raw)
    except (ValueError, RecursionError) as e:
        if getattr(e, "msg", "") != "Extra data":
            raise DataError(f"{path}: malformed JSON: {e}",
                            "repair it, or write one row per line as .jsonl") from e
        yield from _lines(path, io.BytesIO(raw))
        return
    if isinstance(value, dict):
        lists = [value.get("data"), *(value.values() if len(value) == 1 else ())]
        value = next((rows for rows in lists if isinstance(rows, list)), [value])
    yield from enumerate(value if isinstance(value, list) else [value], 1)


def _csv(path: str, delimiter: str = ",") -> Iterator[tuple[int, Any]]:
    """Every value is text, unchanged. A byte that is not UTF-8 becomes a lone surrogate, which `check_text`
    refuses."""
    csv.field_size_limit(sys.maxsize)
    with io.TextIOWrapper(_open(path), "utf-8-sig", "surrogateescape", newline="") as f:
        reader = csv.reader(f, delimiter=delimiter, strict=True)
        header = next(reader, [])
        if twice := {name for name in header if header.count(name) > 1}:
            raise DataError(f"{path}: the header names {sorted(twice)} twice",
                            "give each column a unique name")
        while True:
            line = reader.line_num + 1
            try:
                values = next(reader, None)
            except csv.Error as e:
                yield line, BadRow(path, line, "", f"malformed CSV: {e}")
                continue
            if values is None:
                return
            if len(values) != len(header):
                why = f"{len(values)} fields, the header names {len(header)}" if values else "blank line"
                yield line, BadRow(path, line, "", why)
            else:
                yield line, dict(zip(header, values))


def _parquet(path: str, columns: Collection[str] | None) -> Iterator[tuple[int, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as e:
        raise DataError(f"{path}: reading Parquet needs pyarrow", "pip install pyarrow") from e
    line = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
            # in batches, because rows of reasoning traces can have 100 kB each
            for batch in file.iter_batches(1024, columns=names):
                for value in batch.to_pylist():
                    yield (line := line + 1), value
    except (pyarrow.ArrowException, OSError, ValueError) as e:
        raise DataError(f"{path}: cannot be read as Parquet after row {line}: {e}",
                        "write the file again") from e


READERS = {".jsonl": _json_lines, ".ndjson": _json_lines, ".json": _json, ".csv": _csv,
           ".tsv": functools.partial(_csv, delimiter="\t"), ".parquet": _parquet}
