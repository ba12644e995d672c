"""A run without a model: the real pipeline, queue and journal, the numpy engine, and a learner whose new
weights are a number derived from all that it learned from."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from faulty_engine import FaultyEngine

from bridges.api import SamplingParams
from bridges.engines.fake_engine import Draft, FakeTransport
from bridges.sources.array_source import random_source
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.monitors.clock import Clock
from jaxfp8rl.rewards.runner import Score
from jaxfp8rl.rollout.pipeline import RolloutPipeline
from jaxfp8rl.rollout.problems import Data
from jaxfp8rl.rollout.scored_groups import Prompt, Rollouts

PROMPTS = [Prompt(Problem(f"p{i}", f"{i}", "1"), (1 + i % 7, 2)) for i in range(11)]
IN_FLIGHT = ["--rollout.engine", "vllm", "--rollout.in_flight", "true"]


class Uneven(FaultyEngine):
    """Advances completions by a token each in an order of its own: by what they are, or by `luck`."""

    luck: np.random.Generator | None = None

    def turn(self, draft: Draft) -> int:
        if self.luck is not None:
            return int(self.luck.integers(2**32))
        return zlib.crc32(f"{draft.request.request_id} {draft.index} {len(draft.tokens)}".encode())


class World:
    """A process of a run in `folder`. With a checkpoint, (masters, loop state, step), it resumes."""

    def __init__(self, folder: Path, words: list[str], checkpoint: tuple | None = None,
                 luck: int | None = None):
        settings = {"run.dir": folder, "run.save_every": 2, "run.steps": 8, "rollout.prompts_per_step": 2,
                    "rollout.samples_per_prompt": 2, "rollout.max_new_tokens": 6}
        self.cfg = load_config("demo", [w for k, v in settings.items() for w in (f"--{k}", str(v))] + words)
        self.engine, self.transport = Uneven(16, 4, slots=3), FakeTransport()
        self.engine.luck = None if luck is None else np.random.default_rng(luck)
        self.transport.open(self.engine)
        self.saved: tuple[int, str, int] = checkpoint or (0, "", 0)
        self.masters, state, self.step = self.saved
        self.history: dict[int, int] = {}
        self.rows: list[dict] = []
        self.ctx: Any = SimpleNamespace(
            cfg=self.cfg, engine=self.engine, player=self.engine, explorer=None, train=PROMPTS, top_k=None,
            stream=Data(SimpleNamespace(tokenizer=None), None, PROMPTS, []).stream(self.cfg),
            sampling=SamplingParams(6, stop_token_ids=(3,)), unfit=lambda request, completion: None,
            stops=SimpleNamespace(cut=lambda request, completion: completion),
            tokenizer=SimpleNamespace(completion_text=lambda ids: " ".join(map(str, ids)),
                                      decode=lambda ids, special: ""),
            rewards=SimpleNamespace(score=lambda items: [Score(len(text) % 5 / 4, "ok")
                                                         for _, text in items]))
        self.batches = RolloutPipeline(self.ctx)
        self.notes = list(self.batches.restore(json.loads(state), self.step)) if state else []
        self.publish()
        if not state:
            self.save()

    def publish(self) -> None:
        source = random_source(self.engine.expected_manifest(), self.masters, 1.0)
        self.transport.publish(source, self.step)

    def one_step(self) -> Rollouts:
        self.step += 1
        clock = Clock()
        batch = self.batches.next_batch(self.step, clock)
        learned = [(g.prompt.problem.id, [(c.token_ids.tobytes(), c.logprobs.tobytes(), c.version_spans)
                                          for c in g.completions], g.rewards.tobytes()) for g in batch.chosen]
        self.masters = zlib.crc32(repr((self.masters, learned)).encode())
        self.history[self.step] = self.masters
        self.rows.append(batch.metrics() | batch.age(self.step - 1) | clock.metrics())
        with self.batches.held(clock):
            self.publish()
        return batch

    def save(self) -> None:
        self.saved = self.masters, json.dumps(self.batches.state()), self.step

    def run(self) -> World:
        while self.step < self.cfg.run.steps:
            self.one_step()
            if self.step % self.cfg.run.save_every == 0:
                self.save()
        return self

    def lines(self) -> list[dict]:
        path = Path(self.cfg.run.dir) / "rollouts.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
