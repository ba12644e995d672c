"""verifiers' own evaluation of tasks, with its own program "null", at an endpoint that says what is given:
`python own_evaluation.py < {"env", "seat", "plays": [[task, what is said], ...]}` prints the rewards as its
last line."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import tempfile
from pathlib import Path

from aiohttp import web
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes.subprocess import SubprocessRuntime
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from jaxfp8rl.environments.openai_messages import completion, events, reply_of


async def evaluated(env: dict, seat: str, task: dict, says: list[str]) -> float:
    left = iter(enumerate(says))

    async def answer(request):
        tools = (await request.json()).get("tools", [])
        number, text = next(left)
        message, _ = reply_of(text, tools, "hermes", (), number)
        return web.Response(body=events(completion(message, number)), content_type="text/event-stream")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}, "max_turns": len(says)}
    its = load_environment(resolve_env_config({**env, seat: agent}))
    ctx = ModelContext("m", EvalClientConfig(base_url=f"http://127.0.0.1:{runner.addresses[0][1]}/v1"))
    kind = type(its.taskset).task_type()
    async with its.serving():
        (slot,) = its.slots(kind(kind.data_type().model_validate(task), its.config.taskset.task))
        episode = await its.run_slot(slot, ctx)
    await runner.cleanup()
    assert episode.ok, [*episode.errors, *(e for t in episode.traces for e in t.errors)]
    return episode.traces[0].reward


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        # its program in this Python, which has the packages, instead of one that uv would make from the index
        SubprocessRuntime.scripts_dir = folder
        script = Path(folder) / f"{hashlib.sha256(CHAT_PROGRAM_SOURCE.encode()).hexdigest()}.py"
        script.write_text(CHAT_PROGRAM_SOURCE)
        SubprocessRuntime._interpreters[str(script)] = sys.executable
        asked = json.load(sys.stdin)
        rewards = [asyncio.run(evaluated(asked["env"], asked["seat"], *play)) for play in asked["plays"]]
        print(f"\n{json.dumps(rewards)}")


if __name__ == "__main__":
    main()
