"""Places for completions that are sampled at once, given in the order of `bridges.order`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Hashable

from bridges.order import Order, Waiting


class Gate:
    """`places` of them, in one event loop. A waiter that is cancelled gives up its turn."""

    def __init__(self, places: int, order: Order):
        self.order, self._places, self._free, self._age = order, places, places, 0
        self._waiting: list[tuple[Waiting, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def place(self, group: Hashable) -> AsyncIterator[None]:
        await self._enter(group)
        self.order.started(group)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, group: Hashable) -> None:
        if self._free:
            self._free -= 1
            return
        self._age += 1
        mine = Waiting(group, self._age, self.order.starts), asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine[1]
        except asyncio.CancelledError:
            if mine in self._waiting:
                self._waiting.remove(mine)
            else:  # its turn had come
                self._leave()
            raise

    def _leave(self) -> None:
        # a waiter that was cancelled in this turn of the loop has not removed itself yet
        if waiting := [w for w in self._waiting if not w[1].cancelled()]:
            first = waiting[self.order.sorted([w for w, _ in waiting])[0]]
            self._waiting.remove(first)
            first[1].set_result(None)
            return
        self._free += 1
        if self._free == self._places:
            self.order.forget()
