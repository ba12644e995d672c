"""The replicas of a served engine: which are up, who is asked next, and how one that is down comes back."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence

from bridges.api import BridgeError, EngineDirty, EngineUnhealthy, first_line


@dataclasses.dataclass(eq=False)
class Replica:
    """One server. down: why it is not asked, or "". lost: EngineDirty if only a publish brings it back,
    EngineUnhealthy if nothing does. lives: how often it was up; a late failure of an earlier life ends no
    later one."""

    url: str
    in_flight: int = 0
    down: str = ""
    lost: type[BridgeError] | None = None
    lives: int = 1


class Replicas:
    """In the event loop `loop`. revive: as of VllmClient. seconds: for which a replica may be down. returned:
    is called when one is up again, or lost."""

    def __init__(self, urls: Sequence[str], loop: asyncio.AbstractEventLoop, revive: Callable[[str], None],
                 seconds: float, returned: Callable[[], None]):
        self.all = tuple(map(Replica, urls))
        self._loop, self._revive, self._seconds, self._told = loop, revive, seconds, returned
        self._change, self.closed = asyncio.Event(), False

    def up(self) -> list[Replica]:
        return [r for r in self.all if not r.down]

    def downs(self) -> str:
        return "; ".join(f"{r.url}: {r.down}" for r in self.all if r.down)

    async def choose(self, home: list[Replica], in_flight: bool) -> Replica:
        """The replica of the prompt, or that with the fewest in flight. Waits while all are down; what is in
        flight also waits for a publish, if that brings one back."""
        if home and not home[0].down:
            return home[0]
        until = self._loop.time() + self._seconds
        while not (up := self.up()):
            lacks_weights = any(r.lost is EngineDirty for r in self.all)
            hopeless = all(r.lost for r in self.all) and not (in_flight and lacks_weights)
            if hopeless or self._loop.time() >= until:
                if lacks_weights:
                    raise EngineDirty(f"no engine has weights: {self.downs()}",
                                      "publish a full set of weights first")
                raise EngineUnhealthy(f"no engine is left: {self.downs()}",
                                      "see the engines' logs; go on with --resume")
            self._change.clear()
            try:
                await asyncio.wait_for(self._change.wait(), until - self._loop.time())
            except TimeoutError:
                continue
        home[:] = [min(up, key=lambda r: r.in_flight)]
        return home[0]

    def put_down(self, replica: Replica, lives: int, why: str) -> None:
        """Ask it for nothing until `revive` has brought it back."""
        if replica.lives == lives and (not replica.down or replica.lost is EngineDirty):
            replica.down, replica.lost = why, None
            threading.Thread(target=self._bring_back, args=(replica,), name="revive", daemon=True).start()

    def _bring_back(self, replica: Replica) -> None:
        """Runs in a thread of its own."""
        error = None
        try:
            self._revive(replica.url)
        except Exception as e:  # whatever it was, the replica is not back
            error = e
        if not self.closed:
            self._loop.call_soon_threadsafe(self.returned, replica, error)

    def returned(self, replica: Replica, error: Exception | None = None) -> None:
        if error is None:
            replica.down, replica.lost, replica.lives = "", None, replica.lives + 1
        else:
            replica.down = f"{replica.down}; {first_line(error) or type(error).__name__}"
            replica.lost = EngineDirty if isinstance(error, EngineDirty) else EngineUnhealthy
        self._change.set()
        self._told()
