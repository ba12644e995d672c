"""What a process of environments is told when it starts."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxfp8rl.environments.protocol import Environment
from jaxfp8rl.environments.registry import make_environment
from jaxfp8rl.environments.tools import Toolbox, find_tool


@dataclasses.dataclass(frozen=True)
class World:
    """The environment of a run, as JSON types. timeout_s: for an answer, in seconds. max_observation:
    characters. tools: by name; if there are any, they are the environment. form: of the calls. think_tags:
    around thoughts."""

    name: str
    options: dict[str, Any]
    seed: int
    folder: str
    timeout_s: float
    max_observation: int
    tools: tuple[str, ...] = ()
    form: str = ""
    think_tags: tuple[str, ...] = ()


def made(world: World) -> Environment:
    """The environment that trajectories play with copies of. Raises UserError."""
    if world.tools:
        return Toolbox([find_tool(name, world.folder) for name in world.tools], world.form,
                       tuple(world.think_tags))
    return make_environment(world.name, world.options, world.seed, world.folder, world.form, world.think_tags)
