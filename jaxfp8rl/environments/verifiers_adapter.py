"""Environments written for `verifiers` 0.4, as they come: task.name = "verifiers" (docs/turns.md).

verifiers runs its own episode: its servers, its user, its rubric. Where it asks a model, it finds an endpoint
of OpenAI's form, and that is a `Play`: the request is the observation, the answer is the policy's turn, and
the reward is what verifiers gives at the end. What a request adds to the last one is an observation like any
other, so that the tokens that the policy sampled stay its tokens. A request that does not go on from the last
begins a new branch.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import itertools
import json
import os
import secrets
from collections.abc import Sequence
from typing import Any

from jaxfp8rl.data.problem import Problem
from jaxfp8rl.environments.openai_messages import (
    BadRequest,
    checked_request,
    completion,
    events,
    for_template,
    reply_of,
)
from jaxfp8rl.environments.protocol import Anew, Message
from jaxfp8rl.errors import ConfigError

NAME = "verifiers"
SERIES = "0.4"
KEY = "JAXFP8RL_POLICY_SECRET"  # of this process; the endpoint answers who has it
LIMIT = "limit of the run"  # why verifiers is told that a trajectory stopped


class VerifiersEnvironment:
    """The environment "verifiers". env: the table `[env]` of verifiers' own configs, with `taskset.id`; an
    agent without a program of its own gets jaxfp8rl.environments.verifiers_chat on this machine. size,
    held_out: tasks to train on, and those after them to hold out. form, think_tags: how the model writes
    calls and thoughts."""

    def __init__(self, env: dict[str, Any], size: int = 1000, held_out: int = 0, form: str = "",
                 think_tags: Sequence[str] = ()):
        _check_installed()
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config

        seat = _seat(env)
        self._env: Any = load_environment(resolve_env_config({**env, seat: _agent(env, seat)}))
        self._check(seat)
        self._size, self._held_out, self._form, self._think_tags = size, held_out, form, tuple(think_tags)
        self._endpoint = Endpoint(self._env)
        self._play: Play | None = None

    def problems(self) -> list[Problem]:
        return [self._problem(t) for t in self._env.taskset.take(self._size)]

    def held_out(self) -> list[Problem]:
        return [self._problem(t) for t in self._env.taskset.skip(self._size).take(self._held_out)]

    async def reset(self, problem: Problem) -> Any:
        await self._endpoint.started()
        task_type, config = type(self._env.taskset).task_type(), self._env.config.taskset.task
        task = task_type(task_type.data_type().model_validate(problem.meta["task"]), config)
        messages: Any = problem.prompt
        self._play = Play(self._endpoint, task, [*messages], self._form, self._think_tags)
        observation, _, done = await self._play.next()
        if done:
            raise RuntimeError("the environment ended before it asked the model")
        return observation

    async def step(self, action: str) -> tuple[Any, float, bool, dict[str, int]]:
        assert self._play  # reset was called
        counts = self._play.answer(action)
        return *await self._play.next(), counts

    async def finish(self) -> float:
        assert self._play
        return await self._play.finish()

    def forget(self) -> None:
        if self._play:
            self._play.leave()

    def _problem(self, task: Any) -> Problem:
        """The task as it goes over the wire. Its prompt is what is asked first, unless its program writes
        another."""
        data, key = task.data, task.data.id or task.data.name or task.data.idx
        prompt: list[Message] = [{"role": "system",
                                  "content": data.system_prompt}] if data.system_prompt else []
        if isinstance(data.prompt, str):
            prompt.append({"role": "user", "content": data.prompt})
        else:
            wire = [m.model_dump(mode="json", exclude_none=True) for m in data.prompt or ()]
            prompt += checked_request({"messages": wire})[0]
        said = data.model_dump(mode="json", exclude_none=True)
        return Problem(f"{data.idx}: {key}", tuple(prompt or OPENED_BY_USER), "", {"task": said},
                       question=json.dumps([prompt, data.idx]))

    def _check(self, seat: str) -> None:
        """Raises ConfigError for an agent that the run cannot be."""
        agent, harness = getattr(self._env.config, seat), self._env._harnesses[seat]
        for what in ("model", "client", "sampling"):
            if getattr(agent, what) is not None:
                raise ConfigError(f"task.options.env.{seat}.{what} is set: the policy is the model, and "
                                  "[rollout] says how it samples", f"leave env.{seat}.{what} out")
        if harness.EXECUTES_CODE and agent.runtime.type == "subprocess":
            raise ConfigError(
                f'task.options.env.{seat}.harness.id = "{harness.config.id}" would run what the model '
                f'writes on this '
                "machine, without a sandbox", f"set env.{seat}.runtime.type to a container, or "
                                              f"leave harness out")


OPENED_BY_USER: list[Message] = [{"role": "user", "content": "(the environment's user begins)"}]


def _check_installed() -> None:
    try:
        version = importlib.metadata.version(NAME)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError('task.name = "verifiers": the package verifiers is not installed',
                          'pip install "jaxfp8rl[verifiers]"') from None
    if version.split(".")[:2] != SERIES.split("."):
        raise ConfigError(f'task.name = "verifiers": verifiers {version} drives a model in another '
                          f'way than {SERIES}',
                          f'pip install "jaxfp8rl[verifiers]", which takes {SERIES}')


def _seat(env: dict[str, Any]) -> str:
    """The one agent of the environment."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type

    taskset = env.get("taskset", {}).get("id")
    if not taskset:
        raise ConfigError("task.options.env.taskset.id: which taskset? It needs an id",
                          'for example "textarena"')
    fields = env_config_type(taskset, env.get("id", "")).model_fields
    seats = [name for name, field in fields.items() if isinstance(field.default, AgentConfig)]
    if len(seats) != 1:
        raise ConfigError(f"task.options.env: {len(seats)} agents, {', '.join(seats)}: the policy can be one",
                          "take an environment with one agent")
    return seats[0]


def _agent(env: dict[str, Any], seat: str) -> dict[str, Any]:
    """Its config: on this machine, in a plain conversation, unless it says otherwise."""
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type

    from jaxfp8rl.environments.verifiers_chat import PLUGIN

    taskset = env["taskset"]["id"]
    pinned = env_config_type(taskset, env.get("id", "")).model_fields[seat].default.harness is not None
    own = pinned or default_harness_id(taskset) != "bash"
    return {"runtime": {"type": "subprocess"}, **({} if own else {"harness": {"id": PLUGIN}}),
            **env.get(seat, {})}


class Endpoint:
    """What all episodes of a process share: the environment's servers, and the model's endpoint on this
    machine."""

    def __init__(self, env: Any):
        self.env, self.plays = env, dict[str, Play]()
        self.context: Any = None
        self._serving: asyncio.Task | None = None
        self._key = secrets.token_urlsafe()

    async def started(self) -> None:
        """Start it, once. Raises what its start raised."""
        if self._serving is None:
            self._up = asyncio.get_running_loop().create_future()
            self._serving = asyncio.create_task(self._serve())
        await asyncio.shield(self._up)

    async def _serve(self) -> None:
        """In a task of its own, which lives as long as the process: what is entered here is left nowhere
        else."""
        from aiohttp import web
        from verifiers.v1.clients import EvalClientConfig, ModelContext

        try:
            async with contextlib.AsyncExitStack() as stack:
                await stack.enter_async_context(self.env.serving())
                app = web.Application(client_max_size=1 << 28)
                app.router.add_post("/v1/chat/completions", self._asked)
                runner = web.AppRunner(app)
                await runner.setup()
                await web.TCPSite(runner, "127.0.0.1", 0).start()
                os.environ[KEY] = self._key
                url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
                self.context = ModelContext(model="policy",
                                            client=EvalClientConfig(base_url=url, api_key_var=KEY))
                self._up.set_result(None)
                await asyncio.Event().wait()
        except Exception as e:
            self._up.set_exception(e)

    async def _asked(self, request: Any) -> Any:
        from aiohttp import web

        play = self.plays.get(request.headers.get("X-Session-ID", ""))
        given = request.headers.get("Authorization", "").encode()
        if play is None or not secrets.compare_digest(given, f"Bearer {self._key}".encode()):
            return web.json_response({"error": {"message": "no trajectory of this run asks this"}},
                                     status=401)
        body = await request.json()
        try:
            answer = await play.ask(body)
        except BadRequest as e:
            return web.json_response({"error": {"message": str(e)}}, status=400)
        if body.get("stream"):
            return web.Response(body=events(answer), content_type="text/event-stream")
        return web.json_response(answer)


class Play:
    """An episode: it runs until it asks the model, and waits for the policy's turn.

    known: the conversation as both sides have it, an assistant's message as the program has it."""

    def __init__(self, endpoint: Endpoint, task: Any, prompt: list[Message], form: str,
                 think_tags: tuple[str, ...]):
        self._endpoint, self._form, self._think_tags = endpoint, form, think_tags
        self._known, self._tools = prompt, list[dict[str, Any]]()
        self._said: list[tuple[Message, str]] = []  # (a turn as the program has it, its own text)
        self._asks: asyncio.Queue[tuple[dict[str, Any], asyncio.Future] | None] = asyncio.Queue()
        self._pending: asyncio.Future | None = None
        self._turns, self._traces = itertools.count(), list[Any]()
        (slot,) = endpoint.env.slots(task)
        self._episode = asyncio.create_task(
            endpoint.env.run_slot(slot, endpoint.context, on_trace=self._minted))
        self._episode.add_done_callback(lambda _: self._asks.put_nowait(None))

    def _minted(self, trace: Any) -> None:
        self._endpoint.plays[trace.id] = self
        self._traces.append(trace)

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The policy's answer to a request. Raises BadRequest."""
        checked_request(body)
        answer = asyncio.get_running_loop().create_future()
        self._asks.put_nowait((body, answer))
        return await answer

    async def next(self) -> tuple[str | list[Message] | Anew, float, bool]:
        """(observation, reward, done): the next request, or the end."""
        while (asked := await self._asks.get()) is not None:
            body, self._pending = asked
            if not self._pending.done():  # else who asked has gone
                return self._observed(*checked_request(body)), 0.0, False
        return "", self._reward(), True

    def answer(self, action: str) -> dict[str, int]:
        """Answer the request with a turn -> counts of its calls."""
        assert self._pending
        number = next(self._turns)
        if self._tools and not self._form:
            raise ConfigError("the environment offers tools, and the chat template does not show how a "
                              "call is written",
                              "set environment.tool_calls")
        message, counts = reply_of(action, self._tools, self._form, self._think_tags, number)
        if not self._pending.done():
            self._pending.set_result(completion(message, number))
        mine = checked_request({"messages": [message]})[0][0]
        self._known = [*self._known, mine]
        self._said.append((mine, action))
        return counts

    async def finish(self) -> float:
        """End the episode as a limit of verifiers' own does -> its reward."""
        for trace in self._traces:
            if not trace.is_completed:
                trace.stop(LIMIT)
        asked = self._asks.get_nowait() if not self._asks.empty() else None
        for answer in [self._pending, *([asked[1]] if asked else [])]:
            if answer and not answer.done():
                answer.set_exception(BadRequest(LIMIT))
        await asyncio.wait([self._episode])
        return self._reward()

    def leave(self) -> None:
        self._episode.cancel()
        for trace in self._traces:
            self._endpoint.plays.pop(trace.id, None)

    def _observed(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[Message] | Anew:
        """What is new in a request."""
        known, same = self._known, tools == self._tools and messages[: len(self._known)] == self._known
        self._known, self._tools = messages, tools
        new = [for_template(self._own(m), self._form) for m in (messages[len(known):] if same else messages)]
        return new if same else Anew(new, tools)

    def _own(self, message: Message) -> Message:
        """A turn of the policy as it wrote it."""
        text = next((text for mine, text in reversed(self._said) if mine == message), None)
        return message if text is None else {"role": "assistant", "content": text}

    def _reward(self) -> float:
        """Raises RuntimeError for an episode that failed, or in which more than one agent played."""
        episode = self._episode.result()
        if not episode.ok:
            errors = [*episode.errors, *(e for t in episode.traces for e in t.errors)]
            last = errors[-1] if errors else None
            raise RuntimeError(f"{last.type}: {last.message}" if last
                               else "the episode failed without an error")
        if len(episode.traces) != 1:
            raise RuntimeError(f"the policy played {len(episode.traces)} agents' parts; it can play one")
        return float(episode.traces[0].reward)
