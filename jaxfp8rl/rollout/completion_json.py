"""Completions and trajectories as JSON, for checkpoints."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bridges.api import Completion, VersionSpan
from jaxfp8rl.environments.trajectory import Branch, Segment, Trajectory, trajectory


def completion_to_json(c: Completion) -> dict[str, Any]:
    """A JSON-able dictionary that keeps every bit of the completion, or of the trajectory."""
    if isinstance(c, Trajectory):
        branches = [{"prompt": list(b.prompt), "segments": [_segment_to_json(s) for s in b.segments]}
                    for b in c.branches]
        return {"request_id": c.request_id, "index": c.index, "branches": branches, "end": c.end,
                "full": c.finish_reason == "length", "rewards": list(c.rewards), "counts": c.counts}
    fields = {field.name: getattr(c, field.name) for field in dataclasses.fields(c)}
    arrays = {name: (x.dtype.name, x.tolist()) for name, x in fields.items() if isinstance(x, np.ndarray)}
    spans = [dataclasses.astuple(span) for span in c.version_spans]
    return {k: v for k, v in fields.items() if k not in arrays} | {"version_spans": spans, "arrays": arrays}


def completion_from_json(d: dict[str, Any]) -> Completion:
    """The inverse of `completion_to_json`."""
    if "branches" in d:
        branches = [Branch.of(b["prompt"], [_segment_from_json(s) for s in b["segments"]])
                    for b in d["branches"]]
        return trajectory(d["request_id"], d["index"], branches, d["end"], d["full"], d["rewards"],
                          d["counts"])
    arrays = {name: np.array(values, dtype) for name, (dtype, values) in d["arrays"].items()}
    spans = tuple(VersionSpan(*span) for span in d["version_spans"])
    fields: dict[str, Any] = d | arrays | {"version_spans": spans}
    del fields["arrays"]
    return Completion(**fields)


def _segment_to_json(s: Segment) -> Any:
    """The completion of a turn, or the tokens from outside."""
    return s.token_ids.tolist() if s.completion is None else completion_to_json(s.completion)


def _segment_from_json(d: Any) -> Segment:
    if isinstance(d, list):
        return Segment(np.array(d, np.int32))
    completion = completion_from_json(d)
    return Segment(np.asarray(completion.token_ids, np.int32), completion)
