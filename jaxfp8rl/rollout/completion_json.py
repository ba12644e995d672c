"""Completions as JSON, for checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bridges.api import Completion, VersionSpan


def completion_to_json(c: Completion) -> dict[str, Any]:
    """A JSON-able dictionary that keeps every bit of the completion."""
    fields = {field.name: getattr(c, field.name) for field in dataclasses.fields(c)}
    arrays = {name: (x.dtype.name, x.tolist()) for name, x in fields.items() if isinstance(x, np.ndarray)}
    spans = [dataclasses.astuple(span) for span in c.version_spans]
    return {k: v for k, v in fields.items() if k not in arrays} | {"version_spans": spans, "arrays": arrays}


def completion_from_json(d: dict[str, Any]) -> Completion:
    """The inverse of `completion_to_json`."""
    arrays = {name: np.array(values, dtype) for name, (dtype, values) in d["arrays"].items()}
    spans = tuple(VersionSpan(*span) for span in d["version_spans"])
    fields: dict[str, Any] = d | arrays | {"version_spans": spans}
    del fields["arrays"]
    return Completion(**fields)
