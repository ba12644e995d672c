"""Requests of the learner and completions of the engine, as token ids. `bridges.api` exports all names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

FinishReason = Literal["stop", "length", "abort"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn from logits [V]: divide by `temperature`, keep the `top_k` largest, then the
    `top_p` nucleus.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 switch the filters off. Generation stops after
    `max_tokens` tokens or after a token of `stop_token_ids`, which is part of the completion. For each
    filtered draw the engine reports the tokens that the filters left, if they are at most `support`; 0
    reports none.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    support: int = 0

    @property
    def reported(self) -> int:
        """`support` if draws have one: they are neither greedy nor from the whole vocabulary. Otherwise 0."""
        return self.support if self.temperature > 0 and (self.top_k > 0 or self.top_p < 1) else 0

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if self.support < 0:
            raise ValueError(f"support must be 0 (none) or positive, got {self.support}")


@dataclasses.dataclass(frozen=True)
class GenRequest:
    """A request for `n` completions of one prompt. The learner writes it, the engine reads it.

    `seed`, of 32 bits, makes the n completions reproducible on one engine with one software stack. None draws
    from the engine's own stream. Requests of one `session` have prompts that begin alike: an engine of
    several replicas asks that which has the session's cache. `adapter`: the name of one that the engine holds
    (AdapterTransport).
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    seed: int | None = None
    session: str = ""
    adapter: str = ""

    def __post_init__(self):
        if not self.prompt_token_ids:
            raise ValueError(f"request {self.request_id!r}: the prompt has no tokens")
        if self.n < 1:
            raise ValueError(f"request {self.request_id!r}: n must be at least 1, got {self.n}")
        if self.seed is not None and not 0 <= self.seed < 2**32:
            raise ValueError(f"request {self.request_id!r}: a seed lies in [0, 2^32), got {self.seed}")


@dataclasses.dataclass(frozen=True)
class VersionSpan:
    """Tokens [start, stop) of a completion were sampled at weight `version`."""

    start: int
    stop: int
    version: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled continuation. Written by the engine, read by the learner.

    token_ids [T] int32, the stop token included. logprobs [T] float32: the log-probability of each token
    under the distribution from which it was drawn, after temperature and filters. routed_experts [P + T - 1,
    L, k] unsigned, only for MoE models: the experts of every token that was an input of the model. The
    prompt's [P] tokens come first; the last sampled token is left out. L counts all layers; rows of dense
    layers may hold anything.

    The support of a token is the set of tokens that it was drawn from, itself included. Its log-probability
    is normalised over the support. support_sizes [T] int32: the size of each support, or 0 if it is larger
    than requested. support_ids [sum of support_sizes] int32: the tokens of all supports, one support after
    the other, each in any order. Both are None if no supports were requested (SamplingParams.reported).

    cached_tokens: the tokens of the prompt whose keys and values the engine found in its cache; None if it
    does not say.
    """

    request_id: str
    index: int
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    routed_experts: np.ndarray | None = None
    support_ids: np.ndarray | None = None
    support_sizes: np.ndarray | None = None
    cached_tokens: int | None = None

    def problem(self) -> str | None:
        """Why this completion is unfit to learn from, or None. The learner rejects its whole group if it
        is."""
        if self.logprobs is None or len(self.logprobs) != len(self.token_ids):
            have = "none" if self.logprobs is None else str(len(self.logprobs))
            return f"{len(self.token_ids)} tokens but {have} log-probabilities"
        if len(self.token_ids) == 0:
            return "no tokens"
        if not np.isfinite(self.logprobs).all():
            at = int(np.flatnonzero(~np.isfinite(self.logprobs))[0])
            return f"log-probability {self.logprobs[at]} at token {at}"
        if (np.asarray(self.logprobs) > 1e-3).any():
            at = int(np.argmax(self.logprobs))
            return f"log-probability {self.logprobs[at]:.4g} above 0 at token {at}"
        return self._problem_of_support()

    def _problem_of_support(self) -> str | None:
        ids, sizes = self.support_ids, self.support_sizes
        if ids is None or sizes is None:
            return None if ids is sizes else "support_ids without support_sizes, or the reverse"
        if len(sizes) != len(self.token_ids) or (sizes < 0).any() or sizes.sum() != len(ids):
            return (f"{len(self.token_ids)} tokens with {len(sizes)} supports "
                    f"of {sizes.sum()} tokens in all, {len(ids)} ids")
        owner = np.repeat(np.arange(len(sizes)), sizes)
        found = np.bincount(owner, self.token_ids[owner] == ids, len(sizes))
        if (wrong := (sizes > 0) & (found != 1)).any():
            at = int(np.argmax(wrong))
            return f"token {at} occurs {int(found[at])} times in its own support"
        return None

    def first(self, n: int, prompt_tokens: int) -> Completion:
        """The completion cut after its first `n` tokens. `prompt_tokens`: the length of its prompt."""
        spans = (dataclasses.replace(s, stop=min(s.stop, n)) for s in self.version_spans if s.start < n)
        routes, ids, sizes = self.routed_experts, self.support_ids, self.support_sizes
        if ids is not None and sizes is not None:
            ids, sizes = ids[: sizes[:n].sum()], sizes[:n]
        return dataclasses.replace(
            self, token_ids=self.token_ids[:n], logprobs=self.logprobs[:n], version_spans=tuple(spans),
            routed_experts=None if routes is None else routes[: prompt_tokens + n - 1],
            support_ids=ids, support_sizes=sizes,
        )


def spans(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """The spans of tokens that were sampled at `versions`, one version a token."""
    versions = list(versions)
    ends = [i + 1 for i, v in enumerate(versions) if versions[i + 1 : i + 2] != [v]]
    return tuple(VersionSpan(start, stop, versions[start]) for start, stop in zip([0, *ends], ends))


def joined(first: Completion, rest: Completion) -> Completion:
    """The completion that `rest` makes of `first` by going on after its tokens. Raises ValueError if one has
    routed_experts, which a prompt of its own precedes, or only one has supports."""
    if first.routed_experts is not None or rest.routed_experts is not None:
        raise ValueError(f"request {first.request_id!r}: completions with routed_experts cannot be joined")
    if len(first.token_ids) == 0:
        return rest
    among = None, None
    ids, sizes = (first.support_ids, rest.support_ids), (first.support_sizes, rest.support_sizes)
    if any(x is not None for x in (*ids, *sizes)):
        if any(x is None for x in (*ids, *sizes)):
            raise ValueError(f"request {first.request_id!r}: only a part of it has supports")
        among = (
            np.concatenate(ids),  # pyright: ignore[reportCallIssue, reportArgumentType]
            np.concatenate(sizes))  # pyright: ignore[reportCallIssue, reportArgumentType]
    versions = [s.version for s in (*first.version_spans, *rest.version_spans)
                for _ in range(s.stop - s.start)]
    return dataclasses.replace(
        rest, token_ids=np.concatenate([first.token_ids, rest.token_ids]),
        logprobs=np.concatenate([first.logprobs, rest.logprobs]), version_spans=spans(versions),
        support_ids=among[0], support_sizes=among[1], cached_tokens=first.cached_tokens,
    )


def supports(left: np.ndarray, support: int) -> tuple[np.ndarray, np.ndarray]:
    """Completion.support_ids and support_sizes, from the tokens that the filters left for each draw.

    left [T, up to support + 1]: token ids, -1 for none.
    """
    sizes = (left >= 0).sum(-1)
    sizes = np.where(sizes > support, 0, sizes).astype(np.int32)
    return left[(left >= 0) & (sizes[:, None] > 0)], sizes
