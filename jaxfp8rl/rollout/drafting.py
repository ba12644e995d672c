"""The engine in FP8 that drafts completions beside the run's own (selection.explore_samples), and publishes
to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bridges.api import Completion, GenRequest, RolloutEngine, WeightTransport
from jaxfp8rl.config.schema import Config
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.environments.player import ProblemRequest
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.precision.layer_runs import LayerRun
from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.rollout.adapters import weights_of
from jaxfp8rl.rollout.engines import drafting_engine
from jaxfp8rl.rollout.explore import Explorer
from jaxfp8rl.rollout.pipeline import in_flight
from jaxfp8rl.rollout.scored_groups import Prompt, score
from jaxfp8rl.types import Params


class Drafting(NamedTuple):
    """cfg, runs: of the engine, whose precision is not the run's."""

    cfg: Config
    model: ModelConfig
    runs: tuple[LayerRun, ...]
    engine: RolloutEngine
    transport: WeightTransport

    @classmethod
    def of(cls, cfg: Config, model: ModelConfig) -> Drafting | None:
        """The engine that the config asks for; None if it asks for none."""
        if not cfg.selection.explore_samples:
            return None
        cfg, runs, engine, transport = drafting_engine(cfg, model)
        return cls(cfg, model, runs, engine, transport)

    def publish(self, policy: Params, version: int) -> None:
        """Hand it the policy, quantised."""
        self.transport.verify(self.transport.publish(weights_of(self.cfg, self.model, policy, self.runs),
                                                     version))

    def explorer(self, precise: RolloutEngine, rewards: RewardRunner, tokenizer: Tokenizer) -> Explorer:
        """Who drafts by this engine and goes on by `precise`."""
        s, tags = self.cfg.selection, self.cfg.task.think_tags

        def scored(drafts: Sequence[tuple[GenRequest, Sequence[Completion]]]) -> list[np.ndarray]:
            problems = [r.problem for r, _ in drafts if isinstance(r, ProblemRequest) and r.problem]
            kept = [(Prompt(p, r.prompt_token_ids), tuple(of))
                    for p, (r, of) in zip(problems, drafts, strict=True)]
            return [g.rewards for g in score(kept, tokenizer, rewards, tags)]

        return Explorer(self.engine, in_flight(self.cfg, precise), scored, s.explore_samples,
                        s.explore_tokens,
                        s.explore_kept, s.resolve())

    def close(self) -> None:
        self.transport.close()
        self.engine.close()
