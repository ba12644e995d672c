"""A trajectory: segments of tokens, from the policy or from outside. A completion of one turn is the case of
one.

    branch 0   prompt | turn | observation | turn | observation ...    what the engine was asked with is
    branch 1   rewritten prompt            | turn ...                  always the exact tokens before

A chat template that rewrites history (it drops earlier thoughts, say) begins a new branch, whose prompt holds
the earlier turns as the template writes them now. Every turn is in one branch alone, and is learned from
once.

A Trajectory reads as the Completion of its first prompt: `token_ids` are all its tokens in order, and
`sampled` says which of them the policy drew. Those from outside have log-probability 0 and no version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bridges.api import Completion, FinishReason, VersionSpan

FAILURES = ("timeout", "crash", "lost", "error")  # ends of a trajectory whose environment failed


class Segment(NamedTuple):
    """Tokens [T] from one side. completion: that of a turn of the policy; None for tokens from outside."""

    token_ids: np.ndarray
    completion: Completion | None = None


@dataclasses.dataclass(frozen=True)
class Branch:
    """prompt: tokens that are not learned from. The fields below it are [T], as in a Completion. sampled [T]
    bool: drawn by the policy."""

    prompt: tuple[int, ...]
    segments: tuple[Segment, ...]
    token_ids: np.ndarray
    logprobs: np.ndarray
    sampled: np.ndarray
    version_spans: tuple[VersionSpan, ...]
    support: tuple[np.ndarray, np.ndarray] | None

    @classmethod
    def of(cls, prompt: Sequence[int], segments: Sequence[Segment]) -> Branch:
        lengths = [len(s.token_ids) for s in segments]
        ours = [s.completion is not None for s in segments]
        logp = [np.zeros(n, np.float32) if s.completion is None else s.completion.logprobs
                for s, n in zip(segments, lengths)]
        starts, spans = np.cumsum([0, *lengths]).tolist(), list[VersionSpan]()
        for start, s in zip(starts, segments):
            spans += _moved(s.completion.version_spans, start) if s.completion else ()
        return cls(tuple(prompt), tuple(segments), _joined([s.token_ids for s in segments], np.int32),
                   _joined(logp, np.float32), np.repeat(ours, lengths), tuple(spans), _supports(segments))


@dataclasses.dataclass(frozen=True)
class Trajectory(Completion):
    """end: why it ended: "done" (the environment said so), "turns" or "length" (a limit), or, if the
    environment failed, one of FAILURES and what it said. rewards: of each turn. turns: of each turn, the
    place of its first token and behind its last. counts: what environment and tools counted."""

    branches: tuple[Branch, ...] = ()
    sampled: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, bool))
    end: str = "done"
    rewards: tuple[float, ...] = ()
    turns: tuple[tuple[int, int], ...] = ()
    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether its environment failed, so that it has no reward."""
        return self.end.partition(":")[0] in FAILURES

    def cached(self) -> tuple[int, int]:
        """(tokens of the prompts of turns after the first that the engine found in its cache, all their
        tokens), of the turns of which the engine says how many."""
        found, tokens = 0, 0
        for number, b in enumerate(self.branches):
            at = len(b.prompt)
            for s in b.segments:
                if s.completion and s.completion.cached_tokens is not None and (number or at > len(b.prompt)):
                    found, tokens = found + s.completion.cached_tokens, tokens + at
                at += len(s.token_ids)
        return found, tokens

    @property
    def last(self) -> Completion | None:
        """The completion of its last turn; None if its environment failed before the first."""
        return next((s.completion for b in reversed(self.branches) for s in reversed(b.segments)
                     if s.completion),
                    None)


def trajectory(request_id: str, index: int, branches: Sequence[Branch], end: str, full: bool,
               rewards: Sequence[float], counts: dict[str, int]) -> Trajectory:
    """The trajectory of these branches. full: it has no room left, so that a last turn without an end was
    cut."""
    starts = np.cumsum([0, *(len(b.token_ids) for b in branches)]).tolist()
    one = branches[0] if len(branches) == 1 else None  # keep its arrays, which tell samples apart
    join = lambda name, dtype: (
        getattr(one, name) if one else _joined([getattr(b, name) for b in branches], dtype))
    spans = [span for start, b in zip(starts, branches) for span in _moved(b.version_spans, start)]
    segments = [s for b in branches for s in b.segments]
    ends = np.cumsum([len(s.token_ids) for s in segments]).tolist()
    turns = [(e - len(s.token_ids), e) for e, s in zip(ends, segments) if s.completion]
    finished = [s.completion.finish_reason for s in segments if s.completion]
    cut = end == "length" or (full and finished[-1:] == ["length"])
    reason: FinishReason = "abort" if "abort" in finished else "length" if cut else "stop"
    return Trajectory(
        request_id, index, join("token_ids", np.int32), join("logprobs", np.float32), reason, tuple(spans),
        None,
        *(_supports(segments) or (None, None)), None, tuple(branches), join("sampled", bool), end,
        tuple(rewards),
        tuple(turns), counts)


def sampled_of(c: Completion) -> np.ndarray:
    """Which tokens [T] bool of a completion or trajectory the policy drew."""
    return c.sampled if isinstance(c, Trajectory) else np.ones(len(c.token_ids), bool)


def tokens_sampled(c: Completion) -> int:
    return int(c.sampled.sum()) if isinstance(c, Trajectory) else len(c.token_ids)


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *(np.asarray(p, dtype) for p in parts)])


def _moved(spans: Sequence[VersionSpan], by: int) -> list[VersionSpan]:
    return [VersionSpan(s.start + by, s.stop + by, s.version) for s in spans]


def _supports(segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray] | None:
    """The supports of all tokens, unknown for those from outside; None if the engine reported none."""
    found = [(np.zeros(0, np.int32), np.zeros(len(s.token_ids), np.int32)) if s.completion is None
             else (s.completion.support_ids, s.completion.support_sizes) for s in segments]
    if not found or any(ids is None for ids, _ in found):
        return None
    ids, sizes = zip(*found)
    return _joined(ids, np.int32), _joined(sizes, np.int32)  # pyright: ignore[reportArgumentType]
