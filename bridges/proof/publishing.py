"""A publish as all transports have it: what must hold before, the error of one that failed, and the receipt
of one that did not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from bridges.api import BridgeError, ParamMeta, PublishFailed, PublishReceipt, first_line
from bridges.proof import manifest


def opened[T](held: T | None) -> T:
    """The engine that a transport holds, or its servers. Raises BridgeError if it holds none."""
    if not held:
        raise BridgeError("the transport is not open", "call open(engine) first")
    return held


def check_adapter(name: str, version: int | None) -> None:
    """Raise BridgeError unless an adapter may be published by this name, into an engine with weights of
    `version`."""
    if not name:
        raise BridgeError('adapter "": it is that of requests that name none', "publish it with its base")
    if version is None:
        raise BridgeError(f"adapter {name!r}: the engine has no weights to lie under it",
                          "publish these first")


def check_held(have: tuple[int | None, str, str], receipt: PublishReceipt, known: bool = True) -> None:
    """Raise PublishFailed unless an engine that holds (version, digest, content) holds the publish of
    `receipt`. known: whether the transport knows what it sent."""
    want = receipt.version, receipt.digest, receipt.content
    if not known or have != want:
        raise PublishFailed(f"the engine holds (version, digest, content) {have}, the receipt says {want}",
                            "publish again")


@contextlib.contextmanager
def failing(what: str, next_step: str = "repair the source and publish again in full") -> Iterator[None]:
    """Raise what the source or the engine raises as PublishFailed, which says `what` failed, with the error's
    own next step if it has one."""
    try:
        yield
    except PublishFailed:
        raise
    except Exception as e:
        raise PublishFailed(f"{what}: {first_line(e)}", getattr(e, "next_step", "") or next_step) from e


def receipt(metas: Sequence[ParamMeta], version: int, start: float, caches: Sequence[str],
            content: str = "") -> PublishReceipt:
    """Of a publish that began at `start` (time.perf_counter)."""
    return PublishReceipt(version, len(metas), manifest.nbytes(metas), manifest.digest(metas),
                          time.perf_counter() - start, tuple(caches), content)
