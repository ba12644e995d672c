"""Calls in threads that nobody waits for when this process ends."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any


def in_background(call: Callable[[], Any], after: concurrent.futures.Future | None = None
                  ) -> concurrent.futures.Future:
    """The result of `call`, from a thread of its own, which begins when `after` is done."""
    future = concurrent.futures.Future()

    def run() -> None:
        try:
            concurrent.futures.wait([after] if after else [])
            future.set_result(call())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return future


def together(here: Callable[[], Any], there: Callable[[], None]) -> Any:
    """What `here` returns, while `there` runs. Each may wait for the other, but nobody waits when either has
    failed."""
    calls = [in_background(there), in_background(here)]
    done, _ = concurrent.futures.wait(calls, return_when=concurrent.futures.FIRST_EXCEPTION)
    return [call.result() for call in calls if call in done][-1]
