"""A completion in flight in the embedded engine, as the host knows it, and the tokens that are computed once
for several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from bridges.api import Completion, FinishReason, GenRequest, spans, supports


@dataclasses.dataclass(eq=False)
class Flight:
    """One completion. seed: two of 32 bits. number: in the batch, or -1. What has been sampled of it: tokens
    [t], logp [t], version [t], among (the ids and sizes of supports), and routes [inputs, L, k], of the
    prompt, too."""

    request: GenRequest
    index: int
    seed: tuple[int, int]
    age: int
    number: int = -1
    adapter: tuple[int, int] | None = None  # the slot and the version of the request's, if it names one
    since: int = 0  # the starts before it waited
    tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    logp: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))
    versions: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int64))
    among: tuple[np.ndarray, np.ndarray] | None = None
    routes: np.ndarray | None = None
    # (tokens here, version from there)
    changes: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    done: Completion | None = None

    def add(self, tokens: np.ndarray, logp: np.ndarray, left: np.ndarray | None,
            routes: np.ndarray | None) -> None:
        """What the batch has drawn."""
        ends = [count for count, _ in self.changes[1:]] + [len(tokens)]
        counts = np.diff(ends, prepend=0)
        versions = np.repeat([version for _, version in self.changes], counts)
        self.tokens, self.logp = np.concatenate([self.tokens, tokens]), np.concatenate([self.logp, logp])
        self.versions = np.concatenate([self.versions, versions])
        if left is not None:
            new = supports(left, self.request.sampling.reported)
            old = self.among or (new[0][:0], new[1][:0])
            self.among = np.concatenate([old[0], new[0]]), np.concatenate([old[1], new[1]])
        if routes is not None and self.routes is not None:
            self.routes = np.concatenate([self.routes, routes])

    def completion(self, reason: FinishReason) -> Completion:
        routes = None if self.routes is None else self.routes[: len(self.request.prompt_token_ids)
                                                              + len(self.tokens) - 1]
        return Completion(self.request.request_id, self.index, self.tokens, self.logp, reason,
                          spans(self.versions.tolist()), routes, *(self.among or (None, None)),
                          cached_tokens=0)

    @property
    def slot(self) -> int:
        """Of its adapter; 0 for none."""
        return self.adapter[0] if self.adapter else 0

    def resume(self, begun: Completion) -> None:
        """Take over what another batch began."""
        if begun.finish_reason != "abort":
            self.done = begun
        self.tokens, self.logp = np.asarray(begun.token_ids, np.int32), np.asarray(begun.logprobs, np.float32)
        self.versions = np.repeat([s.version for s in begun.version_spans],
                                  [s.stop - s.start for s in begun.version_spans])
        self.routes = begun.routed_experts
        if begun.support_ids is not None and begun.support_sizes is not None:
            self.among = begun.support_ids, begun.support_sizes


@dataclasses.dataclass(eq=False)
class Prompt:
    """Tokens that are computed once, and the flights that go on after them. number: in the batch, or -1."""

    tokens: tuple[int, ...]
    flights: list[Flight]
    number: int = -1

    def keep_routes(self, routes: np.ndarray) -> None:
        """Routes [tokens, L, k] of a prompt. A flight keeps those that it was sampled with."""
        for f in self.flights:
            known = 0 if f.routes is None else len(f.routes)
            f.routes = routes if f.routes is None else np.concatenate([f.routes, routes[known:]])


def prompts_of(flights: Sequence[Flight]) -> list[Prompt]:
    """A prompt for each flight that goes on after its tokens, and one for all of a request that have none
    yet."""
    found, fresh = list[Prompt](), dict[int, Prompt]()
    for f in flights:
        f.number = -1
        if not len(f.tokens) and id(f.request) in fresh:
            fresh[id(f.request)].flights.append(f)
            continue
        found.append(Prompt((*f.request.prompt_token_ids, *f.tokens.tolist()), [f]))
        if not len(f.tokens):
            fresh[id(f.request)] = found[-1]
    return found
