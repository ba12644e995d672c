"""The steps of a publish at one rank. They never raise: what goes wrong is noted, and the guard asks for it.

vLLM 0.32 loses count of the answers of its workers once one of them raises, and would take the answer to one
call for that to the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bridges.api import BridgeError, first_line
from bridges.vllm_plugin.receiver import Receiver

GUARD = "add --middleware bridges.vllm_plugin.guard.Guard"
NOTHING = {"problem": "", "next_step": ""}


class Rank:
    """make: builds the receiver when it is first needed. about: further fields of the description."""

    def __init__(self, rank: int, make: Callable[[], Receiver], about: Callable[[], dict[str, Any]]):
        self._rank, self._make, self._about = rank, make, about
        self._receiver: Receiver | None = None
        self._noted, self._guarded, self._proved = NOTHING, False, False

    @property
    def receiver(self) -> Receiver:
        if self._receiver is None:
            self._receiver = self._make()
        return self._receiver

    def connect(self, said: dict[str, Any]) -> None:
        self._note(lambda: self.receiver.connect(**said))

    def start(self) -> None:
        """Raises BridgeError on a server without a guard, which would go on generating."""
        if not self._guarded:
            raise BridgeError("this server has no guard before its routes", GUARD)
        self._proved = False
        self._note(lambda: self.receiver.start())

    def receive(self, said: dict[str, Any]) -> None:
        self._note(lambda: self.receiver.receive(**said))

    def publish(self, worker: Any, said: dict[str, Any]) -> dict[str, Any]:
        """The steps of a publish that `said` has, by `worker`, vLLM's, which calls those here: buckets begin
        one, and digests end it -> what was noted, and the seconds until all that came was written."""
        begun, answer = time.perf_counter(), {}

        def steps() -> None:
            if said.get("buckets"):
                worker.start_weight_update()
            worker.update_weights(said)
            answer["seconds"] = time.perf_counter() - begun
            if "digests" in said and not self._noted["problem"]:
                self.receiver.prove()
                self._proved = True
                worker.finish_weight_update()

        self._note(steps)
        return answer | self.asked("state")

    def finish(self) -> None:
        """Raises BridgeError unless the publish was proved."""
        if not self._proved:
            raise BridgeError("the publish was not proved", GUARD)
        self._guarded = False

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()

    def asked(self, what: str) -> dict[str, Any]:
        """The guard's calls: "describe", "renew", "prove", "verify" and "state". They answer with what was
        noted first, a problem and its next step, "" for none, and forget it."""
        answer: dict[str, Any] = {"rank": self._rank}
        if what == "describe":
            self._note(lambda: answer.update(self.receiver.describe() | self._about()))
        elif what == "renew":
            self._noted, self._guarded = NOTHING, True
            self._note(lambda: self.receiver.check())
        elif what == "prove":
            self._proved = self._note(lambda: self.receiver.prove())
        elif what == "verify":
            self._note(lambda: self.receiver.verify())
        noted, self._noted = self._noted, NOTHING
        return answer | noted

    def _note(self, call: Callable[[], Any]) -> bool:
        try:
            call()
        except Exception as e:  # of whatever class: another rank must not wait for this one
            said = first_line(e) if isinstance(e, BridgeError) else f"{type(e).__name__}: {first_line(e)}"
            if not self._noted["problem"]:
                self._noted = {"problem": said, "next_step": getattr(e, "next_step", "")}
            return False
        return True
