"""The best and the worst completion in samples.jsonl, shown at the end of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxfp8rl.monitors.jsonl import whole_lines

FIELDS = ("step", "id", "prompt", "completion", "answer", "reward", "finish_reason")
ROOM = 220  # characters of a text on the terminal


def extremes(path: Path) -> dict[str, dict[str, Any]]:
    """The `best` and `worst` rows of samples.jsonl by reward; of equal rewards the latest. Only `worst` if
    all rewards are equal, and {} if no row has a reward."""
    found: dict[str, dict[str, Any]] = {}
    for row in map(json.loads, whole_lines(path)) if path.is_file() else ():
        if not is_reward(row.get("reward")):
            continue
        for name, better in (("best", 1), ("worst", -1)):
            if name not in found or better * (row["reward"] - found[name]["reward"]) >= 0:
                found[name] = row
    if found and found["best"]["reward"] == found["worst"]["reward"]:
        del found["best"]
    return {name: {key: row[key] for key in FIELDS if key in row} for name, row in found.items()}


def is_reward(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def completion_lines(row: Mapping[str, Any], heading: str) -> str:
    """A completion as lines of text that fit a log and a narrow terminal."""
    facts = [f"{name:<12}{one_line(row[key])}" for key, name in _NAMES if row.get(key) is not None]
    return "\n  ".join([heading, *facts])


_NAMES = (("prompt", "prompt"), ("completion", "completion"), ("answer", "answer"))


def lines_of(found: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    """The result of `extremes` as lines for the terminal."""
    for name, row in found.items():
        which = name if len(found) > 1 else "last"
        heading = f"{which} sampled completion: reward {row['reward']:g} at step {row.get('step', '?')}"
        if len(found) == 1:
            heading += "; every sampled completion has this reward"
        yield completion_lines(row, heading)


def one_line(text: Any, room: int = ROOM) -> str:
    """Text as one line: line breaks and control characters are escaped, and long text loses its middle."""
    if isinstance(text, list):  # a chat
        text = "\n".join(f"{m.get('role')}: {m.get('content')}" if isinstance(m, Mapping) else str(m)
                         for m in text)
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text))
    return text if len(text) <= room else f"{text[: room * 2 // 3]} ... {text[-room // 3 :]}"
