"""Explore cheaply, train precisely: drafts by an engine in FP8, of which some go on by the engine in the
training precision (after Sol-RL, arXiv 2604.06916).

    draft      selection.explore_samples of each prompt, of selection.explore_tokens at most, in FP8
    select     rollout.samples_per_prompt of them by their rewards, as `jaxfp8rl.losses.selection` does
    go on      after the first selection.explore_kept of their tokens, in the training precision

Both engines hold the same version of the weights. Each token has the log-probability of the distribution that
it was drawn from, the draft's tokens that of the FP8 engine, so the rollout correction is exact. The rest is
drawn by random numbers of its own: given a draft, it has the distribution that the precise engine gives to
it. A completion knows how often its draft was expected to be selected, and `selection.weights = "inverse"`
divides by that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from bridges.api import Completion, GenRequest, Health, InFlight, RolloutEngine, VersionSpan
from jaxfp8rl.losses.selection import Selection, keep

SEED = 57  # apart from what else is drawn from a request's seed
Score = Callable[[Sequence[tuple[GenRequest, Sequence[Completion]]]], list[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Explored(Completion):
    """A completion that goes on after a draft. drafted: its first tokens, which are the draft's. inclusion:
    how often a draft like it was expected among those selected, times the drafts, over those selected: 1
    where any may be taken."""

    drafted: int = 0
    inclusion: float = 1.0


class Explorer:
    """Who samples a step's completions with drafts. It stands where an engine samples, and takes requests
    with a seed. A step may sample several times (dynamic sampling), and then asks `metrics` once.

    cheap: the engine that drafts. precise: the engine that goes on. score: the rewards [n] of each request's
    drafts, NaN for none.
    """

    def __init__(self, cheap: RolloutEngine, precise: InFlight, score: Score, samples: int, tokens: int,
                 kept: float,
                 by: Selection):
        self._cheap, self._precise, self._score = cheap, precise, score
        self._samples, self._tokens, self._kept, self._by = samples, tokens, kept, by
        self._calls: list[_Call] = []  # since `metrics` was asked

    def health(self) -> Health:
        return self._precise.health() if self._cheap.health().ok else self._cheap.health()

    def generate(self, requests: Sequence[GenRequest], /) -> list[list[Completion]]:
        """n completions of each request, in order. Raises what the engines raise."""
        asked = [self._drafting(r) for r in requests]
        drafts = self._cheap.generate(asked)
        rewards, begun, chance = self._score(list(zip(asked, drafts, strict=True))), [], []
        for r, of, reward in zip(requests, drafts, rewards, strict=True):
            usable = ~np.isnan(reward)  # what has no score goes on only if there are too few others
            if usable.sum() < r.n:
                usable[:] = True
            taken = keep(np.nan_to_num(reward), usable, self._by._replace(keep=r.n),
                         np.random.default_rng([r.seed or 0, SEED]))
            begun.append([self._begun(r, j, of[i]) for j, i in enumerate(taken.places)])
            chance.append((taken.inclusion * usable.sum() / r.n, taken.places))
        done = self._finished(requests, begun)
        self._count(drafts, rewards, begun, chance, done)
        return [[Explored(**_fields(c), drafted=len(b.token_ids), inclusion=float(inclusion[i]))
                 for c, b, i in zip(done[r.request_id], before, places, strict=True)]
                for r, before, (inclusion, places) in zip(requests, begun, chance)]

    def _drafting(self, r: GenRequest) -> GenRequest:
        """The request for a prompt's drafts. Its random numbers are not those of the tokens to come."""
        seed = int(np.random.SeedSequence([r.seed or 0, SEED]).generate_state(1)[0])
        sampling = dataclasses.replace(r.sampling, max_tokens=min(self._tokens, r.sampling.max_tokens))
        return dataclasses.replace(r, n=self._samples, seed=seed, sampling=sampling)

    def _begun(self, r: GenRequest, index: int, draft: Completion) -> Completion:
        """What of a draft stays. One that has ended stays as it is where all of its tokens do."""
        count = int(len(draft.token_ids) * self._kept)
        stays = self._kept == 1 and (draft.finish_reason == "stop" or count == r.sampling.max_tokens)
        ids, sizes = draft.support_ids, draft.support_sizes
        if ids is not None and sizes is not None:
            ids, sizes = ids[: sizes[:count].sum()], sizes[:count]
        spans = tuple(VersionSpan(s.start, min(s.stop, count), s.version) for s in draft.version_spans
                      if s.start < count)
        return dataclasses.replace(
            draft, request_id=r.request_id, index=index, token_ids=draft.token_ids[:count],
            logprobs=draft.logprobs[:count],
            finish_reason=draft.finish_reason if stays else "abort", version_spans=spans,
            support_ids=ids, support_sizes=sizes)

    def _finished(self, requests: Sequence[GenRequest], begun: Sequence[Sequence[Completion]]
                  ) -> dict[str, Sequence[Completion]]:
        done: dict[str, Sequence[Completion]] = {}
        self._precise.submit(requests, begun)
        while len(done) < len(requests):
            done |= {group[0].request_id: group for group in self._precise.poll()}
        return done

    def _count(self, drafts: Any, rewards: Any, begun: Any, chance: Any, done: dict) -> None:
        length = lambda groups: sum(len(c.token_ids) for of in groups for c in of)
        self._calls.append(_Call(length(drafts), length(begun), length(done.values()),
                                 np.concatenate(rewards), np.concatenate([inclusion for inclusion, _ in chance])))

    def metrics(self) -> dict[str, float]:
        """explore/* of all that was sampled since it was last asked; {} if nothing was."""
        if not self._calls:
            return {}
        calls, self._calls = self._calls, []
        drawn, stay, whole = (sum(n) for n in zip(*((c.drawn, c.stay, c.whole) for c in calls)))
        rewards, inclusion = (np.concatenate([getattr(c, name) for c in calls]) for name in ("rewards",
                                                                                            "inclusion"))
        scored = rewards[~np.isnan(rewards)]
        return {
            "explore/tokens": drawn, "explore/kept_fraction": stay / max(drawn, 1),
            "explore/precise_tokens": whole - stay,
            "explore/reward_mean": float(scored.mean()) if len(scored) else float("nan"),
            "explore/undefined": len(rewards) - len(scored),
            "explore/unreachable": float((inclusion == 0).mean()),
        }


class _Call(NamedTuple):
    """Of one call of `generate`: tokens drafted, tokens of drafts that stay, tokens of the completions; the
    reward and the inclusion of each draft."""

    drawn: int
    stay: int
    whole: int
    rewards: np.ndarray
    inclusion: np.ndarray


def _fields(c: Completion) -> dict[str, Any]:
    return {f.name: getattr(c, f.name) for f in dataclasses.fields(Completion)}


def relative_inclusion(completions: Sequence[Completion]) -> np.ndarray:
    """[n]: `Explored.inclusion`, 1 of what was not drafted."""
    return np.array([getattr(c, "inclusion", 1.0) for c in completions])
