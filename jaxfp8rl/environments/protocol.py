"""The protocol of an environment: what it is told, what it answers, and the check of each answer.

    env.reset(problem) -> observation                    its answer before the first turn, "" for none
    env.step(action)   -> observation, reward, done      its answer to what the policy wrote

Both may be `async`. An observation is text, or chat messages {"role", "content"}. `action` is the text of a
turn. The five values of gymnasium's `step` (observation, reward, terminated, truncated, info) are taken as
well, and `reset` may return (observation, info). `problems()` and `held_out()` give the problems of an
environment that has its own. An environment is made once a process; each trajectory plays with a shallow copy
of it. `finish()`, if there is one, gives the reward that is still due when a limit of the run ends a
trajectory, and `forget()` frees what a trajectory holds.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from jaxfp8rl.data.problem import Problem

Message = dict[str, Any]  # {"role": ..., "content": text}


class Environment(Protocol):
    """A trajectory's partner. It may raise: the trajectory then ends, and is counted."""

    def reset(self, problem: Problem) -> Any | Awaitable[Any]: ...

    def step(self, action: str) -> Any | Awaitable[Any]: ...


@dataclass(frozen=True)
class Anew:
    """An observation that is a whole conversation, with the tools that it offers: it goes on in a new
    branch."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


class Answer(NamedTuple):
    """An observation as text or messages, the reward of the turn, whether the trajectory is over, and counts
    of what happened, such as {"malformed_calls": 1}. tools: of an Anew, whose messages the observation is;
    else None.
    """

    observation: str | list[Message]
    reward: float = 0.0
    done: bool = False
    counts: dict[str, int] = {}  # noqa: RUF012  never changed
    tools: list[dict[str, Any]] | None = None


def of_reset(value: Any, longest: int) -> Answer:
    """What `reset` returned. Raises TypeError or ValueError if it is no observation of at most `longest`
    characters."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        value = value[0]
    return Answer(_observation(value, longest), tools=_tools(value))


def of_step(value: Any, longest: int) -> Answer:
    """What `step` returned. Raises as `of_reset`, and for a reward that is not a finite number."""
    if not isinstance(value, tuple) or len(value) not in (3, 4, 5):
        raise TypeError(f"step returned {value!r:.80} instead of (observation, reward, done)")
    counts: dict[str, int] = {}
    if len(value) == 5:  # gymnasium's
        observation, reward, ended, truncated, _ = value
        done = _flag(ended) or _flag(truncated)
    else:
        observation, reward, done = value[0], value[1], _flag(value[2])
        counts = value[3] if len(value) == 4 else {}
    return Answer(_observation(observation, longest), _reward(reward), done, counts, _tools(observation))


def of_finish(value: Any) -> Answer:
    """What `finish` returned. Raises TypeError or ValueError for what is no finite number."""
    return Answer("", _reward(value), done=True)


def _tools(observation: Any) -> list[dict[str, Any]] | None:
    return observation.tools if isinstance(observation, Anew) else None


def _flag(value: Any) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):  # numpy has its own
        raise TypeError(f"done must be true or false, but is {value!r:.40}")
    return bool(value)


def _reward(value: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(f"the reward must be a number, but is {value!r:.40} ({type(value).__name__})")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"the reward is {number}")
    return number


def _observation(value: Any, longest: int) -> str | list[Message]:
    if value is None:
        return ""
    value = value.messages if isinstance(value, Anew) else value
    messages = value if isinstance(value, list | tuple) else [{"role": "user", "content": value}]
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else message
        if not isinstance(content, str):
            raise TypeError(f"an observation must be text or messages, but there is {type(content).__name__}")
        content.encode()  # UnicodeEncodeError, a ValueError, for half a character
    size = sum(len(m["content"]) for m in messages)
    if size > longest:
        raise ValueError(f"an observation of {size:,} characters, more than environment.max_observation = "
                         f"{longest:,}")
    return value if isinstance(value, str) else [dict(m) for m in messages]
