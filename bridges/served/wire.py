"""The contract's types as JSON, for whatever crosses between processes: an array is the base64 of its bytes,
an error its class.

numpy and the standard library only. Nothing that is read here can run code.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from bridges.api import (
    BridgeError,
    Capabilities,
    Completion,
    EngineDirty,
    EngineFormats,
    EngineUnhealthy,
    GenRequest,
    ManifestMismatch,
    ParamMeta,
    PublishFailed,
    PublishReceipt,
    SamplingParams,
    VersionSpan,
)

PROTOCOL = 2  # raised whenever one side could misread the other
# of the environment; a command line can be read by every user of a machine
TOKEN_VARIABLE = "BRIDGES_ENGINE_TOKEN"
ERRORS = {e.__name__: e for e in (BridgeError, EngineDirty, EngineUnhealthy, ManifestMismatch, PublishFailed,
                                  ValueError)}
# arrays of a completion
BY_TOKEN = ("token_ids", "logprobs", "routed_experts", "support_ids", "support_sizes")
ARRAYS = ("int32", "float32", "uint8", "uint16", "uint32")


def pack_array(x: np.ndarray | None) -> dict[str, Any] | None:
    if x is None:
        return None
    x = np.asarray(x)
    return {"dtype": x.dtype.name, "shape": list(x.shape), "data": base64.b64encode(x.tobytes()).decode()}


def unpack_array(d: dict[str, Any] | None) -> np.ndarray | None:
    """Raises ValueError for another dtype than `ARRAYS` names, and for bytes that do not fill the shape."""
    if d is None:
        return None
    if d["dtype"] not in ARRAYS:
        raise ValueError(f"an array of {d['dtype']!r} on the wire, which carries {', '.join(ARRAYS)}")
    return np.frombuffer(bytearray(base64.b64decode(d["data"], validate=True)),
                         d["dtype"]).reshape(d["shape"])


def pack_request(r: GenRequest) -> dict[str, Any]:
    packed = dataclasses.asdict(r)
    packed["prompt_token_ids"] = [int(t) for t in r.prompt_token_ids]
    packed["sampling"]["stop_token_ids"] = [int(t) for t in r.sampling.stop_token_ids]
    return packed


def unpack_request(d: dict[str, Any]) -> GenRequest:
    """Raises ValueError as GenRequest and SamplingParams do, TypeError for unknown fields."""
    sampling = SamplingParams(**{**d["sampling"], "stop_token_ids": tuple(d["sampling"]["stop_token_ids"])})
    return GenRequest(**{**d, "prompt_token_ids": tuple(d["prompt_token_ids"]), "sampling": sampling})


def pack_completion(c: Completion) -> dict[str, Any]:
    arrays = {name: pack_array(getattr(c, name)) for name in BY_TOKEN}
    spans = [dataclasses.astuple(span) for span in c.version_spans]
    return {"request_id": c.request_id, "index": c.index, "finish_reason": c.finish_reason,
            "version_spans": spans, **arrays}


def unpack_completion(d: dict[str, Any]) -> Completion:
    arrays = {name: unpack_array(d[name]) for name in BY_TOKEN}
    return Completion(**{**d, "version_spans": tuple(VersionSpan(*span) for span in d["version_spans"]),
                         **arrays})


def pack_manifest(metas: Iterable[ParamMeta]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(m) for m in metas]


def unpack_manifest(rows: list[dict[str, Any]]) -> tuple[ParamMeta, ...]:
    def tuples(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "shape": tuple(row["shape"]), "block": row["block"] and tuple(row["block"])}

    return tuple(ParamMeta(**tuples(row)) for row in rows)


def unpack_receipt(d: dict[str, Any]) -> PublishReceipt:
    """The inverse of `dataclasses.asdict`."""
    return PublishReceipt(**{**d, "caches_reset": tuple(d["caches_reset"])})


def unpack_capabilities(d: dict[str, Any]) -> Capabilities:
    """The inverse of `dataclasses.asdict`."""
    return Capabilities(**{**d, "formats": EngineFormats(**d["formats"])})


def pack_error(e: Exception) -> dict[str, Any]:
    """A class that the other side does not know becomes EngineUnhealthy: whoever raised it did not mean to.
    Where that is the cause, it goes along: another engine may do better."""
    name = type(e).__name__
    if name not in ERRORS:
        return {"class": "EngineUnhealthy", "message": f"the engine's process failed: {name}: {e}",
                "next_step": "look at its standard error; start a new one if it happens again"}
    next_step = getattr(e, "next_step", "")
    said = {"class": name, "message": str(e).removesuffix(f"\n  next step: {next_step}"),
            "next_step": next_step}
    return said | ({"cause": pack_error(e.__cause__)} if isinstance(e.__cause__, EngineUnhealthy) else {})


def unpack_error(d: dict[str, Any]) -> Exception:
    kind = ERRORS.get(d["class"], BridgeError)
    error = kind(d["message"], d["next_step"]) if issubclass(kind, BridgeError) else kind(d["message"])
    error.__cause__ = unpack_error(d["cause"]) if "cause" in d else None
    return error
