"""Places for completions that are sampled at once, given in the order of `bridges.order`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any

from bridges.order import Order, Waiting

# (who is inside, who waits, the first first) -> who of these may enter, the first first
Fitting = Callable[[Sequence[Any], Sequence[Any]], Sequence[int]]


class Gate:
    """`places` of them, in one event loop. A waiter that is cancelled gives up its turn. fitting: who may
    enter where places are free, of what `place` was told; None for all."""

    def __init__(self, places: int, order: Order, fitting: Fitting | None = None):
        self.order, self._places, self._free, self._age = order, places, places, 0
        self._waiting: list[tuple[Waiting, asyncio.Future[None], Any]] = []
        self._fitting, self._inside, self._looks = fitting, list[Any](), False

    @contextlib.asynccontextmanager
    async def place(self, group: Hashable, who: Any = None) -> AsyncIterator[None]:
        await self._enter(group, who)
        self.order.started(group)
        try:
            yield
        finally:
            self._leave(who)

    async def _enter(self, group: Hashable, who: Any) -> None:
        if self._free and self._fitting is None:
            self._free -= 1
            return
        self._age += 1
        mine = (Waiting(group, self._age, self.order.starts), asyncio.get_running_loop().create_future(), who)
        self._waiting.append(mine)
        self.look()
        try:
            await mine[1]
        except asyncio.CancelledError:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:  # its turn had come
                self._leave(who)
            raise

    def _leave(self, who: Any) -> None:
        self._free += 1
        if self._fitting is not None:
            self._inside = [x for x in self._inside if x is not who]
            self.look()
        else:
            self._let_in()
        if self._free == self._places and not self._waiting:
            self.order.forget()

    def look(self) -> None:
        """Soon let in who fits; once for all that changes meanwhile."""
        if self._fitting is not None and not self._looks:
            self._looks = True
            asyncio.get_running_loop().call_soon(self._let_in)

    def _let_in(self) -> None:
        self._looks = False
        # a waiter that was cancelled in this turn of the loop has not removed itself yet
        waiting = [w for w in self._waiting if not w[1].cancelled()]
        if not (waiting and self._free):
            return
        line = [waiting[i] for i in self.order.sorted([w for w, _, _ in waiting])]
        fits = range(len(line)) if self._fitting is None else self._fitting(self._inside,
                                                                            [who for _, _, who in line])
        for i in fits[: self._free]:
            self._free -= 1
            self._inside += [line[i][2]] if self._fitting else []
            self._waiting.remove(line[i])
            line[i][1].set_result(None)
