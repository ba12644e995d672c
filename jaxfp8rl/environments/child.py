"""A process of environments: `python -m jaxfp8rl.environments.child SOCKET_FD WORLD_JSON`. Never imports jax
or torch.

It is asked one JSON object a line, {"id", "episode", "do": "reset" | "step" | "finish" | "forget", ...}, and
answers each but "forget" with {"id", ...} once it can, in any order: an `async` environment works on many at
once.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import resource
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from jaxfp8rl.data.problem import Problem
from jaxfp8rl.environments.protocol import Answer, Environment, of_finish, of_reset, of_step
from jaxfp8rl.environments.world import World, made
from jaxfp8rl.errors import UserError

# An environment that runs away with memory gets a MemoryError instead of taking the learner's machine down.
MEMORY_BYTES = 8 << 30
OURS = str(Path(__file__).parents[1])


class Stage:
    """The episodes that play in this process."""

    def __init__(self, world: World, prototype: Environment):
        self._world, self._prototype = world, prototype
        self._playing: dict[int, Any] = {}

    def forget(self, episode: int) -> None:
        if callable(leave := getattr(self._playing.pop(episode, None), "forget", None)):
            leave()

    async def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """The answer to "reset", "step" or "finish", or the error that the environment raised."""
        try:
            async with asyncio.timeout(self._world.timeout_s):
                found = await self._ask(asked)
            return {"id": asked["id"], **found._asdict()}
        except TimeoutError:
            return {"id": asked["id"], "error": "timeout"}
        except Exception as e:
            return {"id": asked["id"], "error": f"error: {described(e)}"}

    async def _ask(self, asked: dict[str, Any]) -> Answer:
        longest = self._world.max_observation
        if asked["do"] == "reset":
            playing = self._playing[asked["episode"]] = copy.copy(self._prototype)
            return of_reset(await _value(playing.reset(Problem(**asked["problem"]))), longest)
        playing = self._playing[asked["episode"]]
        if asked["do"] == "step":
            return of_step(await _value(playing.step(asked["action"])), longest)
        return of_finish(await _value(playing.finish()) if hasattr(playing, "finish") else 0.0)


async def _value(found: Any) -> Any:
    return await found if inspect.isawaitable(found) else found


def described(e: Exception) -> str:
    """The exception, and the line of the environment that raised it."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(OURS)]
    frames = [f for f in frames if "asyncio" not in f.filename]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(e).__name__}: {str(e)[:500]}{where}"


def _start(world_json: str) -> tuple[Stage | None, dict[str, Any]]:
    """(the stage, the first message to the parent)."""
    try:
        world = World(**json.loads(world_json))
        return Stage(world, made(world)), {"ready": True}
    except UserError as e:
        return None, {"fatal": e.message, "next_step": e.next_step}
    except Exception as e:  # the parent raises it as a ConfigError
        return None, {"fatal": f"the environment cannot be made: {described(e)}",
                      "next_step": "make it by hand in a fresh Python"}


async def serve(fd: int, world_json: str) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd), limit=1 << 26)
    write = lambda message: writer.write((json.dumps(message) + "\n").encode())
    stage, hello = _start(world_json)
    write(hello)
    await writer.drain()
    working: set[asyncio.Task] = set()

    async def work(asked: dict[str, Any]) -> None:
        write(await stage.answer(asked))  # pyright: ignore[reportOptionalMemberAccess]
        if len(working) == 1:
            signal.setitimer(signal.ITIMER_REAL, 0)

    while stage and (line := await reader.readline()):
        asked = json.loads(line)
        if asked["do"] == "forget":
            stage.forget(asked["episode"])
            continue
        # The parent kills what hangs. This alarm, which by default ends the process, is for one whose parent
        # died.
        signal.setitimer(signal.ITIMER_REAL, stage._world.timeout_s + 5)
        working.add(task := asyncio.create_task(work(asked)))
        task.add_done_callback(working.discard)
    await writer.drain()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    asyncio.run(serve(int(sys.argv[1]), sys.argv[2]))
