"""eval.json: every evaluation of a run, as `jaxfp8rl eval` writes it and `jaxfp8rl report` shows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """Its records, the newest last. Raises ValueError for what `jaxfp8rl eval` has not written."""
    found = json.loads(path.read_text(encoding="utf-8"))
    found = found if isinstance(found, list) else [found]  # as older versions wrote it
    for n, record in enumerate(found, 1):
        if not (isinstance(record, dict) and {"step", "problems", "samples"} <= record.keys() and _estimates(record)):
            raise ValueError(f"record {n} is not of `jaxfp8rl eval`")
    return found


def _estimates(record: Mapping[str, Any]) -> bool:
    found = record.get("pass_at_k")
    whole = lambda x: isinstance(x, dict) and {"estimate", "low", "high"} <= x.keys()
    return isinstance(found, dict) and all(map(whole, found.values()))
