"""Rows of files, checked one by one. A row becomes a prompt, accepted answers and the other columns, or an
error with its line and field."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import hashlib
import json
import math
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jaxfp8rl.data.files import BadRow, Written, data_files, raw_rows
from jaxfp8rl.data.messages import Prompt, as_prompt, check_text, kind
from jaxfp8rl.errors import DataError, nearest
from jaxfp8rl.verifiers import numbers, scorers

AnswerExtract = Literal["auto", "all", "hash", "boxed", "tag", "last_line", "last_number"]
Replies = Literal["refuse", "drop"]
_HASH = re.compile(r"(?<!#)####(?!#)[ \t]*(\S[^\n]*?)\s*\Z")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One usable row. `line` counts from 1; in a file without lines it is the number of the row. `reference`:
    the text from which the answer was extracted."""

    file: str
    line: int
    prompt: Prompt
    answers: tuple[str, ...]
    reference: str = ""
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Fields:
    """The names of a row's fields. A name with dots is a path into an object, unless a column has exactly
    that name. `answer`: "" if there is none. `meta`: the columns that a scorer gets; by default all but
    prompt and answer."""

    prompt: str = "prompt"
    answer: str = "answer"
    answer_extract: AnswerExtract = "auto"
    replies: Replies = "refuse"
    meta: tuple[str, ...] = ()

    def columns(self) -> set[str] | None:
        """The columns to read; None means all."""
        named = [name for name in (self.prompt, self.answer, *self.meta) if name]
        return {part for name in named for part in (name, name.split(".")[0])} if self.meta else None


@dataclasses.dataclass
class Rows:
    """The rows that were read, usable and unusable, in the order of files and lines, with counts of dropped
    and changed rows."""

    files: list[str]
    rows: list[Row] = dataclasses.field(default_factory=list)
    bad: list[BadRow] = dataclasses.field(default_factory=list)
    repeats: int = 0
    replies: int = 0
    left_out: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def total(self) -> int:
        return len(self.rows) + len(self.bad) + self.repeats

    def notes(self) -> list[str]:
        """Sentences about changes to the data that the user did not ask for or could not see."""
        found = []
        if len(self.files) > 1:
            more = f" and {len(self.files) - 5} more" if len(self.files) > 5 else ""
            found.append(
                f"read {self.total:,} rows of {len(self.files)} files: {', '.join(self.files[:5])}{more}")
        if self.repeats:
            found.append(
                f"dropped {self.repeats:,} of {self.total:,} rows that repeat a prompt and its answer "
                'of an earlier row (task.options.repeats = "keep" keeps them)')
        if self.replies:
            found.append(f"cut the assistant's reply off {self.replies:,} of {len(self.rows):,} prompts")
        for column, n in self.left_out.items():
            found.append(f'column "{column}": left out of problem.meta in {n:,} rows: not JSON-serialisable')
        return found


def read_rows(path: str, fields: Fields = Fields(), keep_repeats: bool = False) -> Rows:
    """Read the rows of a file, a folder or a glob. A row that repeats both prompt and answers of an earlier
    row is only counted.

    Raises DataError if a file as a whole cannot be read, or if the path does not name one set of rows.
    """
    found, seen, named = Rows(data_files(path)), set(), set()
    for file, line, value in _every_row(found.files, fields):
        try:
            if isinstance(value, BadRow):
                found.bad.append(value)
                continue
            if not isinstance(value, dict):
                raise Unusable("", f"a row must be an object, but is {kind(value)}")
            prompt, replied = _prompt(value, fields)
            answers, reference = _answers(value, fields)
        except Unusable as e:
            found.bad.append(BadRow(file, line, e.field, e.why))
            continue
        key = hashlib.blake2b(json.dumps([prompt, answers]).encode(), digest_size=16).digest()
        if key in seen and not keep_repeats:
            found.repeats += 1
            continue
        seen.add(key)
        found.replies += replied
        meta = _meta(value, fields, found.left_out)
        named.update(meta)
        found.rows.append(Row(file, line, prompt, answers, reference, meta))
    if found.rows and (lost := [name for name in fields.meta if name not in named]):
        raise DataError(f"{path}: no row has {', '.join(lost)}, which task.options.meta_fields names",
                        "remove or correct the name")
    return found


def refuse(bad: Sequence[BadRow], total: int) -> None:
    """Raise the DataError that lists the first five bad rows, if there are any."""
    if bad:
        more = f"\n  ... and {len(bad) - 5} more" if len(bad) > 5 else ""
        raise DataError(
            f"{len(bad)} of {total} rows cannot be used:\n  " + "\n  ".join(map(str, bad[:5])) + more,
            "fix the rows, name other fields with task.options.prompt_field and answer_field, or set "
            "task.skip_bad_rows = true to skip and count such rows",
        )


class Unusable(Exception):
    def __init__(self, field: str, why: str):
        self.field, self.why = field, why


def _every_row(files: Sequence[str], fields: Fields) -> Iterator[tuple[str, int, Any]]:
    for file in files:
        for line, value in raw_rows(file, fields.columns()):
            yield file, line, value


_MISSING = object()


def _get(value: Any, name: str) -> Any:
    """The value under a name: the column with exactly this name, or the end of a path into objects or into
    their JSON text."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            return _MISSING
    if not isinstance(value, dict):
        return _MISSING
    if name in value:
        return value[name]
    head, dot, rest = name.partition(".")
    return _get(value[head], rest) if dot and head in value else _MISSING


def _field(row: dict[str, Any], name: str) -> Any:
    value = _get(row, name)
    if value is _MISSING:
        inner = [f"{column}.{key}" for column, value in row.items() if isinstance(value, dict)
                 for key in value]
        raise Unusable(name, "missing" + nearest(name, [*row, *inner]))
    return value


def _prompt(row: dict[str, Any], fields: Fields) -> tuple[Prompt, bool]:
    """(the prompt, whether a reply after it was cut off)."""
    try:
        prompt, replied = as_prompt(_field(row, fields.prompt))
        if replied and fields.replies == "refuse":
            raise ValueError(
                'ends with the assistant\'s reply, perhaps the answer: task.options.replies = '
                '"drop" cuts it off')
        return prompt, replied
    except ValueError as e:
        raise Unusable(fields.prompt, str(e)) from e


def _answers(row: dict[str, Any], fields: Fields) -> tuple[tuple[str, ...], str]:
    """(accepted answers, the text from which the first was extracted or "" if that is the answer itself)."""
    if not fields.answer:
        return ("",), ""
    value = _field(row, fields.answer)
    try:
        texts = [_text(x) for x in (value if isinstance(value, list) else [value])]
        if not texts:
            raise ValueError("an empty list")
        answers = [extract_reference(text, fields.answer_extract) for text in texts]
    except ValueError as e:
        raise Unusable(fields.answer, str(e)) from e
    return tuple(dict.fromkeys(answers)), texts[0] if answers[0] != texts[0] else ""


def _text(value: Any) -> str:
    """An answer as text; a number as it is spelled in the file. Raises ValueError for anything else."""
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("empty")
        return check_text(value)
    if isinstance(value, decimal.Decimal):
        return f"{value:f}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        inside = f", {', '.join(value)}: name one of these with a dot" if isinstance(value, dict) else ""
        raise ValueError(f"must be a string, a number or a list of these, but is {_called(value)}{inside}")
    if isinstance(value, Written):
        return value.text
    # readers turn a column of integers with a null into floats: 2.0 is 2
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)


def _called(value: Any) -> str:
    return str(value) if isinstance(value, float) else kind(value)


def extract_reference(text: str, how: AnswerExtract) -> str:
    """The answer in a reference text. Raises ValueError if there is none.

    - hash: the text after the last `####`, as in GSM8K; a number loses its thousands separators
    - boxed: the contents of the last \\boxed{}
    - auto: as hash if the last line has `####`, otherwise the whole text
    - all, tag, last_line, last_number: as `scorers.extract`
    """
    if how in ("auto", "hash") and (found := _HASH.search(text)):
        return numbers.whole_number(found[1].removeprefix("$")) or found[1]
    if how in ("auto", "all"):
        return text
    answer = {"hash": None,
              "boxed": boxed(text)}[how] if how in ("hash", "boxed") else scorers.extract(text, how)
    if not answer:
        raise ValueError(f'has no answer of the form that task.options.answer_extract = "{how}" takes')
    return answer


def boxed(text: str) -> str | None:
    """The contents of the last \\boxed{} whose braces close."""
    for start in reversed([m.end() for m in re.finditer(r"\\boxed\s*\{", text)]):
        depth = 1
        for i, c in enumerate(text[start:], start):
            depth += (c == "{") - (c == "}")
            if not depth:
                return text[start:i].strip()
    return None


def _meta(row: dict[str, Any], fields: Fields, left_out: collections.Counter[str]) -> dict[str, Any]:
    """The other columns as JSON values. Values that JSON cannot represent are left out and counted by
    column."""
    names = fields.meta or [name for name in row if name not in (fields.prompt, fields.answer)]
    meta = {}
    for name in names:
        value = _get(row, name)
        if value is _MISSING:
            continue
        try:
            meta[name] = _plain(value)
        except (ValueError, TypeError):
            left_out[name] += 1
    return meta


def _plain(value: Any) -> Any:
    """A value as JSON: dates in ISO format, bytes decoded as UTF-8. Raises TypeError or ValueError for a
    value without such a form, such as an image."""
    match value:
        case None | str() | int():
            return value
        case float():
            return float(value)
        case dict():
            return {str(k): _plain(v) for k, v in value.items()}
        case list() | tuple():
            return [_plain(v) for v in value]
        case bytes():
            return value.decode()
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal() | uuid.UUID() | datetime.timedelta():
            return str(value)
    raise TypeError(type(value).__name__)
