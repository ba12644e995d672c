"""Completions and log-probabilities of saved weights.

The engine holds one version of the weights at a time, or one base and several adapters over it. Requests of
what it holds at once are sampled together; a request of another snapshot publishes that one first, and is
then sampled. The log-probabilities that a client gets are those of the trainer's forward pass at temperature
1: the engine's own, where it draws from that distribution, else those of a forward pass over what was drawn.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

import numpy as np

from bridges.api import (
    AdaptedSource,
    AdapterTransport,
    Completion,
    GenRequest,
    RolloutEngine,
    SamplingParams,
    WeightTransport,
)
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.publish.adapters import AdaptedWeights
from jaxfp8rl.publish.wire import LearnerWeights
from jaxfp8rl.rollout.adapters import weights_of
from jaxfp8rl.rollout.engines import temperatures
from jaxfp8rl.rollout.stops import Stops
from jaxfp8rl.serving.refusal import Refused, check_tokens
from jaxfp8rl.serving.rows import Datum
from jaxfp8rl.serving.trainer import Programs
from jaxfp8rl.types import Params

SEEDS = 2**32
MOST = 4096  # completions of a request: those of other clients wait meanwhile


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
        self._programs, self._tokenizer = programs, tokenizer
        self._engine, self._transport = engine, transport
        self._versions, self._holds = itertools.count(1), None
        # of adapters in the engine; used last stands last
        self._names: OrderedDict[Snapshot, str] = OrderedDict()
        self.at_once = max(engine.capabilities().adapters, 1)

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
            room = self.longest - len(draw.prompt)
            raise Refused(
                f"sample: a prompt of {len(draw.prompt)} tokens and max_tokens = {draw.max_tokens}: this "
                f"server samples 1 token or more, and up to {self.longest} with the prompt",
                (f"ask for max_tokens from 1 to {room}" if room > 0
                 else f"cut the prompt to {self.longest - 1} tokens or fewer")
                + ", or start the server with larger task.max_prompt_tokens or rollout.max_new_tokens")
        check_tokens("sample: prompt", draw.prompt, words)
        check_tokens("sample: stop", draw.stop_tokens or (), words)
        if not 1 <= draw.n <= MOST:
            raise Refused(f"sample: num_samples = {draw.n}: a request samples 1 to {MOST}",
                          "send several requests" if draw.n > MOST else "ask for 1 or more")
        if not (0 <= draw.temperature < float("inf") and 0 < draw.top_p <= 1 and draw.top_k >= 0):
            raise Refused(f"sample: temperature = {draw.temperature}, top_k = {draw.top_k or -1}, top_p = "
                          f"{draw.top_p}: out of their ranges",
                          "temperature is 0 or more, top_k positive or -1, top_p in (0, 1]")
        coolest, hottest = temperatures(self._programs.cfg)
        if draw.temperature and not coolest <= draw.temperature <= hottest:
            raise Refused(f"sample: temperature = {draw.temperature:g}: vLLM, which samples here, takes 0 "
                          f"and {coolest:g} to {hottest:g}", "choose one of these")
        if draw.scored is not None and not 0 <= draw.scored < max(len(draw.prompt), 1):
            raise Refused(f"sample: prompt_logprobs_last_n = {draw.scored} with a prompt of "
                          f"{len(draw.prompt)} "
                          "tokens", "the first token has no log-probability: ask for fewer than all")

    def sample(self, asked: Sequence[tuple[Snapshot, Draw]]) -> list[Sampled]:
        """The completions of each request, at its snapshot's weights: of as many snapshots together as the
        engine holds."""
        found: dict[int, Sampled] = {}
        for snapshots in itertools.batched(dict.fromkeys(snapshot for snapshot, _ in asked), self.at_once):
            at = [i for i, (snapshot, _) in enumerate(asked) if snapshot in snapshots]
            found |= zip(at, self._together([asked[i] for i in at], self._hold(snapshots)))
        return [found[i] for i in range(len(asked))]

    def _together(self, asked: Sequence[tuple[Snapshot, Draw]], names: dict[Snapshot, str]) -> list[Sampled]:
        requests = [self._request(i, draw, names[snapshot]) for i, (snapshot, draw) in enumerate(asked)]
        drawn = self._engine.generate([request for request, _ in requests])
        kept = [[stops.cut(request, c) for c in found] for (request, stops), found in zip(requests, drawn)]
        return [Sampled(*pair) for pair in self._scored(asked, kept)]

    def _hold(self, snapshots: Sequence[Snapshot]) -> dict[Snapshot, str]:
        """The name that each has in the engine, which holds all of them."""
        if not self._engine.capabilities().adapters:
            self._hold_alone(snapshots[0])
            return {snapshots[0]: ""}
        self._hold_base(snapshots[0])
        for snapshot in snapshots:
            if snapshot in self._names:
                self._names.move_to_end(snapshot)
        for snapshot in snapshots:
            if snapshot not in self._names:
                self._hold_by_name(snapshot)
        return {snapshot: self._names[snapshot] for snapshot in snapshots}

    def _hold_alone(self, snapshot: Snapshot) -> None:
        if self._holds is not snapshot:
            self._holds = None
            receipt = self._transport.publish(self._source(snapshot), next(self._versions))
            self._transport.verify(receipt)
            self._holds = snapshot

    def _hold_base(self, one: Snapshot) -> None:
        """The base is in the engine, once the weights of one snapshot have been."""
        if self._engine.weight_version() is None:
            self._names.clear()
            receipt = self._transport.publish(self._source(one), next(self._versions))
            self._transport.verify(receipt)

    def _hold_by_name(self, snapshot: Snapshot) -> None:
        transport, source = cast(AdapterTransport, self._transport), self._source(snapshot)
        assert isinstance(source, AdaptedSource)
        if len(self._names) == self.at_once:
            _, oldest = self._names.popitem(last=False)
            transport.drop_adapter(oldest)
        version = next(self._versions)
        transport.publish_adapter(str(version), source.adapters, version)
        self._names[snapshot] = str(version)

    def _source(self, snapshot: Snapshot) -> LearnerWeights | AdaptedWeights:
        p = self._programs
        return weights_of(p.cfg, p.model, snapshot.policy, p.runs)

    def _request(self, i: int, draw: Draw, adapter: str) -> tuple[GenRequest, Stops]:
        tokens = self._tokenizer.eos_token_ids if draw.stop_tokens is None else draw.stop_tokens
        tokens = tuple(dict.fromkeys([*tokens, *self._tokenizer.tokens_with(draw.stop_strings)]))
        sampling = SamplingParams(draw.max_tokens, draw.temperature, draw.top_k, draw.top_p, tokens)
        seed = None if draw.seed is None else draw.seed % SEEDS
        return (GenRequest(str(i), draw.prompt, sampling, draw.n, seed, adapter=adapter),
                Stops(self._tokenizer, draw.stop_strings, tokens, ()))

    def _scored(self, asked: Sequence[tuple[Snapshot, Draw]], kept: Sequence[list[Completion]]
                ) -> list[tuple[list[Completion], np.ndarray | None]]:
        """The completions with log-probabilities at temperature 1, and those of the prompts."""
        draws = [draw for _, draw in asked]
        wanted: list[tuple[int, int]] = []  # (request, completion; -1 for the prompt alone)
        for i, draw in enumerate(draws):
            wanted += [(i, -1)] if draw.scored and draw.plain else []
            wanted += [] if draw.plain else [(i, j) for j in range(len(kept[i]))]
        whole = {(i, j): np.asarray([*draws[i].prompt, *([] if j < 0 else kept[i][j].token_ids)], np.int32)
                 for i, j in wanted}
        found: dict[tuple[int, int], np.ndarray] = {}
        for snapshot in dict.fromkeys(asked[i][0] for i, _ in wanted):
            of = [at for at in wanted if asked[at[0]][0] is snapshot]
            found |= zip(of, self._logprobs(snapshot, [whole[at] for at in of]))
        return [([c if (i, j) not in found
                  else dataclasses.replace(c, logprobs=found[i, j][len(draw.prompt):])
                  for j, c in enumerate(kept[i])],
                 None if draw.scored is None else self._of_prompt(draw,
                                                                  found.get((i, -1 if draw.plain else 0))))
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
