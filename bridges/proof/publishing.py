"""A publish as all transports have it: the error of one that failed, and the receipt of one that did not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from bridges.api import ParamMeta, PublishFailed, PublishReceipt, first_line
from bridges.proof import manifest


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
