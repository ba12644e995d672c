"""What runs where: the processes of a run as jobs, each with its host, GPUs, words and variables. Loads no
jax."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

LEARNER, ENGINE = "learner", "engine"


class Need(NamedTuple):
    """A process to place, and the GPUs that it wants."""

    role: str
    number: int
    gpus: int

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


class Place(NamedTuple):
    """Where a process goes. gpus: as CUDA_VISIBLE_DEVICES names them; None: whoever starts it chooses them.
    port: an engine's own; of the first learner, the one where the learners meet."""

    host: str
    port: int
    gpus: tuple[str, ...] | None = ()


@dataclasses.dataclass(frozen=True)
class Job:
    """A process of the run. words: of its command, which begins with "jaxfp8rl" or "vllm". environment:
    variables beside those of whoever starts it. address: an engine's URL, or where the learners meet."""

    need: Need
    place: Place
    words: tuple[str, ...]
    environment: dict[str, str]
    address: str

    @property
    def name(self) -> str:
        return self.need.name


@dataclasses.dataclass(frozen=True)
class Plan:
    """The jobs of a run. running: URLs of engines that run already. inside: the engine of the first learner's
    own process, or "". folder: of the token, logs and scripts; all hosts see it. restarts: of each engine."""

    learners: tuple[Job, ...]
    engines: tuple[Job, ...]
    running: tuple[str, ...]
    inside: str
    token_file: str
    folder: Path
    restarts: int
    tensor_parallel_size: int = 1

    @property
    def jobs(self) -> tuple[Job, ...]:
        return self.learners + self.engines
