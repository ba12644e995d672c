"""The part of a run's context that rollout needs: a protocol, so that rollout does not import the whole
run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from bridges.api import Completion, GenRequest, RolloutEngine, SamplingParams
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.dataset import PromptStream
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.distributed.mesh import MeshLayout
from jaxfp8rl.distributed.process_group import ProcessGroup
from jaxfp8rl.environments.player import Generates
from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.rollout.explore import Explorer
from jaxfp8rl.rollout.scored_groups import Prompt
from jaxfp8rl.rollout.stops import Stops


class RolloutContext(Protocol):
    """A subset of `jaxfp8rl.training.context.RunContext`, which implements it."""

    cfg: Config
    group: ProcessGroup
    layout: MeshLayout
    engine: RolloutEngine
    rewards: RewardRunner
    stops: Stops
    stream: PromptStream[Prompt]
    tokenizer: Tokenizer
    top_k: Callable | None
    train: list[Prompt]
    explorer: Explorer | None

    @property
    def player(self) -> Generates: ...

    @property
    def no_routes(self) -> np.ndarray | None: ...

    @property
    def sampling(self) -> SamplingParams: ...

    def unfit(self, request: GenRequest, completion: Completion) -> str | None: ...

    def with_routes(self, samples: list[Sample]) -> list[Sample]: ...
