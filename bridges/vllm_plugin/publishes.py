"""A publish as the server sees it: which step may follow which, and whether the engine may generate.

A failed step leaves the engine dirty. It stays paused and refuses every request for tokens until a full
publish has succeeded. The ranks note what goes wrong (`bridges.vllm_plugin.rank`), and are asked for it after
each step.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from bridges.vllm_plugin.asgi import Refused

RPC = "jaxfp8rl"  # the method of vLLM's workers that `bridges.vllm_plugin.versions` adds
NEXT = "publish a full set of weights"
PUBLISH = "/jaxfp8rl/publish"


class Publishes:
    """The state of one engine. `client`: vLLM's EngineClient.

    problem: why the engine must not generate; "" while it may. learner: who began the publish that is under
    way, or "". key: that of their lease. asleep: the memory that was given back, by vLLM's tags.
    """

    def __init__(self, client: Any):
        self._client, self.lock = client, asyncio.Lock()  # held by the step that is under way
        self._described: list[dict[str, Any]] | None = None
        self.problem, self.learner, self.key, self._proved = _problem_at_start(client), "", "", False
        self.asleep: set[str] = set()

    async def ranks(self, *what: Any) -> list[dict[str, Any]]:
        """The answers of all ranks of tensor parallelism."""
        return [json.loads(x) for x in await self._client.collective_rpc(RPC, args=what)]

    async def describe(self) -> list[dict[str, Any]]:
        """By rank: what it holds (`bridges.vllm_plugin.receiver.Receiver.describe`)."""
        if self._described is None:
            found = await self.ranks("describe")
            if problem := next((f"rank {x['rank']}: {x['problem']}" for x in found if x["problem"]), ""):
                raise Refused(501, problem, "see the log of the server")
            self._described = found
        return self._described

    def unfit(self, key: str) -> str:
        """Why a request for tokens is refused; "" if it may go to the engine, where it waits while a publish
        is under way. A publish has failed once another lease than the one that began it is held, or none.
        key: that of the lease that is held, or ""."""
        if self.learner and key != self.key:
            self.fail(f"{self.learner} left in the middle of a publish")
        return "" if self.learner else self.problem

    def fail(self, why: str) -> None:
        self.problem, self.learner = why, ""

    async def check(self, *asked: Any, fatal: bool = True) -> list[dict[str, Any]]:
        """The answers of the ranks. Raises Refused(500) with what they have noted since the last step, if
        anything, or note of what they are asked. `fatal`: it leaves the engine dirty."""
        answers = await self.ranks(*asked or ("state",))
        if ill := [x for x in answers if x["problem"]]:
            found = "; ".join(f"rank {x['rank']}: {x['problem']}" for x in ill)
            if fatal:
                self.fail(found)
            raise Refused(500, found, next((x["next_step"] for x in ill if x["next_step"]), NEXT))
        return answers

    async def begin(self, learner: str, key: str, pause: bool) -> None:
        """Before vLLM's start of an update: the engine is dirty from here on. Raises Refused(409) while the
        engine sleeps, or runs, and Refused(500) where a rank could not be written; `pause` freezes it."""
        if "weights" in self.asleep:
            raise Refused(409, "the engine is asleep", "POST /wake_up first")
        if not pause and not await self._client.is_paused():
            raise Refused(409, "the engine is generating", f"POST {PUBLISH} in its place")
        await self.check("renew", fatal=False)
        if pause:
            # The /pause of vLLM 0.32 sleeps 20 ms more, so that its caller sees all tokens before its answer.
            await self._client.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        self._proved = False
        self.problem, self.learner, self.key = "a publish has not finished", learner, key

    def require_begun(self, key: str) -> None:
        """Raise Refused(409) unless the holder of this lease has begun a publish that has not failed."""
        if self.unfit(key) or not self.learner:
            raise Refused(409, self.problem or "no publish is under way", "begin a new one")

    async def receive(self, said: dict[str, Any]) -> float:
        """Have all ranks write what comes, and prove it if `said` has the digests -> the seconds in which it
        was written. Raises Refused(500)."""
        found = await self.check("publish", said)
        self._proved = "digests" in said
        return max(x.get("seconds", 0.0) for x in found)

    async def prove(self) -> None:
        """Compare the live bytes of all ranks with what the learner sent. Raises Refused(500)."""
        await self.check("prove")
        self._proved = True

    async def commit(self, keep_cache: bool, version: str = "") -> None:
        """Drop caches of older weights, take back the cache's memory if it is asleep, and let the engine
        generate: at once with `version`, which else vLLM has set.

        Running requests compute their prefix again under the new weights, unless `keep_cache`.
        """
        if not self._proved:
            raise Refused(500, "the publish was not proved", NEXT)
        if not keep_cache and not await self._client.reset_prefix_cache(True, True):
            self.fail("vLLM did not reset its prefix cache")
            raise Refused(500, self.problem, NEXT)
        await self.wake_cache()
        self.problem, self.learner = "", ""
        if version:  # the engine takes calls in their order, and need not be waited for between these
            await asyncio.gather(self._client.update_weight_version(version),
                                 self._client.resume_generation())

    async def wake_cache(self) -> None:
        """Take back the memory of the cache, if that of the weights alone was."""
        if self.asleep == {"kv_cache"}:
            await self._client.wake_up(["kv_cache"])
            self.asleep = set()

    async def verify(self) -> None:
        """Read the live bytes again. Raises Refused(500) if they have changed, which leaves the engine
        dirty."""
        if self.problem:
            raise Refused(409, self.problem, NEXT)
        await self.check("verify")


def _problem_at_start(client: Any) -> str:
    """Raises Refused(501) for a server whose engines this guard cannot speak for."""
    if (replicas := client.vllm_config.parallel_config.data_parallel_size) > 1:
        raise Refused(501, f"--data-parallel-size {replicas}: the guard speaks for one engine",
                      "start one server for each replica, and publish to all their addresses")
    if str(client.vllm_config.load_config.load_format).startswith("dummy"):
        return "nothing has been published to it yet"
    return ""
