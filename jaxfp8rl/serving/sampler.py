"""Completions and log-probabilities of saved weights.

The engine holds one version of the weights at a time. Requests of the same snapshot are sampled together; a
request of another snapshot publishes that one first, and is then sampled. The log-probabilities that a client
gets are those of the trainer's forward pass at temperature 1: the engine's own, where it draws from that
distribution, else those of a forward pass over what was drawn.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from bridges.api import Completion, GenRequest, RolloutEngine, SamplingParams, WeightTransport
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.rollout.adapters import weights_of
from jaxfp8rl.rollout.stops import Stops
from jaxfp8rl.serving.refusal import Refused
from jaxfp8rl.serving.rows import Datum
from jaxfp8rl.serving.trainer import Programs
from jaxfp8rl.types import Params

SEEDS = 2**32


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """Weights saved for sampling. `path`: where they also lie on the disk, or ""."""

    policy: Params
    path: str = ""


@dataclasses.dataclass(frozen=True)
class Draw:
    """What a client asks for. stops: None stands for the tokenizer's own. scored: how many of the prompt's
    last tokens get log-probabilities; None for none."""

    prompt: tuple[int, ...]
    n: int
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop_tokens: tuple[int, ...] | None
    stop_strings: tuple[str, ...]
    scored: int | None

    @property
    def plain(self) -> bool:
        """Whether the engine's log-probabilities are those at temperature 1."""
        return self.temperature in (0.0, 1.0) and self.top_k == 0 and self.top_p == 1.0


class Sampled:
    """The completions of a request. prompt_logprobs [prompt] float32: NaN where there is none, or None."""

    def __init__(self, completions: list[Completion], prompt_logprobs: np.ndarray | None):
        self.completions, self.prompt_logprobs = completions, prompt_logprobs


class Sampler:
    """The engine of a server. Its methods run one after the other, in one thread."""

    def __init__(self, programs: Programs, tokenizer: Tokenizer, engine: RolloutEngine,
                 transport: WeightTransport):
        self._programs, self._tokenizer, self._engine, self._transport = programs, tokenizer, engine, transport
        self._versions, self._holds = itertools.count(1), None

    @property
    def longest(self) -> int:
        """The most tokens of a prompt and its completion."""
        return self._programs.cfg.max_model_len

    def check(self, draw: Draw) -> None:
        """Raise Refused, which names the field, for what cannot be sampled."""
        words = self._programs.model.vocab_size
        if not draw.prompt:
            raise Refused("sample: the prompt has no tokens", "send one token or more")
        if len(draw.prompt) + draw.max_tokens > self.longest or draw.max_tokens < 1:
            raise Refused(
                f"sample: a prompt of {len(draw.prompt)} tokens and max_tokens = {draw.max_tokens}: this server "
                f"samples 1 token or more, and up to {self.longest} with the prompt",
                "ask for less, or start the server with larger task.max_prompt_tokens or rollout.max_new_tokens")
        for name, ids in {"prompt": draw.prompt, "stop": draw.stop_tokens or ()}.items():
            if any(not 0 <= i < words for i in ids):
                raise Refused(f"sample: {name} holds a token outside the vocabulary of {words}",
                              "use the tokenizer of the base model")
        if draw.n < 1:
            raise Refused(f"sample: num_samples = {draw.n}", "ask for 1 or more")
        if not (0 <= draw.temperature < float("inf") and 0 < draw.top_p <= 1 and draw.top_k >= 0):
            raise Refused(f"sample: temperature = {draw.temperature}, top_k = {draw.top_k or -1}, top_p = "
                          f"{draw.top_p}: out of their ranges",
                          "temperature is 0 or more, top_k positive or -1, top_p in (0, 1]")
        if draw.scored is not None and not 0 <= draw.scored < max(len(draw.prompt), 1):
            raise Refused(f"sample: prompt_logprobs_last_n = {draw.scored} with a prompt of {len(draw.prompt)} "
                          "tokens", "the first token has no log-probability: ask for fewer than all")

    def sample(self, snapshot: Snapshot, draws: Sequence[Draw]) -> list[Sampled]:
        """The completions of each request, at the snapshot's weights."""
        self._hold(snapshot)
        asked = [self._request(i, d) for i, d in enumerate(draws)]
        drawn = self._engine.generate([request for request, _ in asked])
        kept = [[stops.cut(request, c) for c in found] for (request, stops), found in zip(asked, drawn)]
        return [Sampled(*pair) for pair in self._scored(snapshot, draws, kept)]

    def _hold(self, snapshot: Snapshot) -> None:
        if self._holds is snapshot:
            return
        p, self._holds = self._programs, None
        source = weights_of(p.cfg, p.model, snapshot.policy, p.runs)
        receipt = self._transport.publish(source, next(self._versions))
        self._transport.verify(receipt)
        self._holds = snapshot

    def _request(self, i: int, draw: Draw) -> tuple[GenRequest, Stops]:
        tokens = self._tokenizer.eos_token_ids if draw.stop_tokens is None else draw.stop_tokens
        tokens = tuple(dict.fromkeys([*tokens, *self._tokenizer.tokens_with(draw.stop_strings)]))
        sampling = SamplingParams(draw.max_tokens, draw.temperature, draw.top_k, draw.top_p, tokens)
        seed = None if draw.seed is None else draw.seed % SEEDS
        return (GenRequest(str(i), draw.prompt, sampling, draw.n, seed),
                Stops(self._tokenizer, draw.stop_strings, tokens, ()))

    def _scored(self, snapshot: Snapshot, draws: Sequence[Draw], kept: Sequence[list[Completion]]
                ) -> list[tuple[list[Completion], np.ndarray | None]]:
        """The completions with log-probabilities at temperature 1, and those of the prompts."""
        wanted: list[tuple[int, int]] = []  # (request, completion; -1 for the prompt alone)
        for i, draw in enumerate(draws):
            wanted += [(i, -1)] if draw.scored and draw.plain else []
            wanted += [] if draw.plain else [(i, j) for j in range(len(kept[i]))]
        whole = {(i, j): np.asarray([*draws[i].prompt, *([] if j < 0 else kept[i][j].token_ids)], np.int32)
                 for i, j in wanted}
        found = dict(zip(wanted, self._logprobs(snapshot, [whole[at] for at in wanted])))
        return [([c if (i, j) not in found else dataclasses.replace(c, logprobs=found[i, j][len(draw.prompt):])
                  for j, c in enumerate(kept[i])],
                 None if draw.scored is None else self._of_prompt(draw, found.get((i, -1 if draw.plain else 0))))
                for i, draw in enumerate(draws)]

    def _of_prompt(self, draw: Draw, logp: np.ndarray | None) -> np.ndarray:
        values = np.full(len(draw.prompt), np.nan, np.float32)
        if logp is not None and draw.scored:
            values[-draw.scored:] = logp[: len(draw.prompt)][-draw.scored:]
        return values

    def _logprobs(self, snapshot: Snapshot, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The log-probability [T] of each token of each sequence; NaN for its first."""
        data = [Datum(s[:-1], s[1:], {}) for s in sequences]
        found = self._programs.logprobs(snapshot.policy, data) if data else []
        return [np.concatenate([[np.float32(np.nan)], x]) for x in found]
