"""Requests, scored groups of completions, and their samples: the steps from problems to a packed batch."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from bridges.api import Completion, EngineUnhealthy, GenRequest, Health, SamplingParams
from jaxfp8rl.config.learning import Loss
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.errors import DataError
from jaxfp8rl.losses.advantages import advantages, informative_groups, overlong_penalty
from jaxfp8rl.monitors.end.extremes import completion_lines
from jaxfp8rl.rewards.runner import RewardRunner, Score
from jaxfp8rl.rollout import support
from jaxfp8rl.verifiers.scorers import THINK_TAGS, thinks_on

THINK_TOKENS = 32  # tokens at the end of a prompt to search for a think tag, blanks included


class Prompt(NamedTuple):
    """A problem and its token ids."""

    problem: Problem
    token_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Group:
    """The n completions of one prompt with their rewards [n], NaN where a completion has no score.

    named: the values of each named reward [n], whose weighted sum `rewards` is. malformed: the number of
    completions on which the scorer failed, which gives them the reward 0.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    texts: tuple[str, ...]
    rewards: np.ndarray
    named: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    malformed: int = 0


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """The usable groups of a step; `rejected`: for each rejected group the reason; `chosen`: the groups to
    learn from; `queue`: the metrics of the queue that they come from, if there is one."""

    groups: tuple[Group, ...]
    rejected: tuple[str, ...]
    chosen: tuple[Group, ...]
    queue: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hollow: bool = False  # the tokens are in another process (jaxfp8rl.rollout.shared_batches)

    def with_queue(self, queue: Mapping[str, float]) -> Rollouts:
        return dataclasses.replace(self, queue=queue)

    def metrics(self) -> dict[str, float]:
        """The metrics reward/*, response/*, rollout/*, support/*, queue/* and tokens/rollout."""
        rewards = np.concatenate([g.rewards for g in self.groups])
        completions = [c for g in self.groups for c in g.completions]
        lengths = np.array([len(c.token_ids) for c in completions])
        undefined = np.isnan(rewards)
        return {
            "reward/mean": float(np.mean(rewards[~undefined])) if not undefined.all() else float("nan"),
            "reward/std": float(np.std(rewards[~undefined])) if not undefined.all() else float("nan"),
            "reward/undefined": int(undefined.sum()),
            "reward/malformed": sum(g.malformed for g in self.groups),
            **named_means(self.groups),
            "reward/groups_solved_in_part": float(
                np.mean(informative_groups([g.rewards for g in self.groups]))),
            "response/length_mean": float(lengths.mean()),
            "response/length_max": int(lengths.max()),
            "response/cut_fraction": float(np.mean([c.finish_reason == "length" for c in completions])),
            "rollout/groups_rejected": len(self.rejected),
            "rollout/groups_chosen": len(self.chosen),
            "tokens/rollout": int(lengths.sum()), **support.metrics(completions), **self.queue,
        }

    def age(self, version: int) -> dict[str, float]:
        """weights/version, the oldest version that sampled a token, and by how many versions the tokens are
        older than `version`, the learner's: mean over tokens and maximum."""
        spans = [span for g in self.groups for c in g.completions for span in c.version_spans]
        tokens = np.array([span.stop - span.start for span in spans])
        ages = version - np.array([span.version for span in spans])
        return {
            "weights/version": min(span.version for span in spans),
            "staleness/versions_mean": float((ages * tokens).sum() / tokens.sum()),
            "staleness/versions_max": int(ages.max()),
        }


def named_means(groups: Sequence[Group], undefined: float = np.nan) -> dict[str, float]:
    """The mean of each named reward over its completions. A completion without a value counts as `undefined`;
    NaN leaves it out."""
    columns = {name: np.concatenate([g.named[name] for g in groups])
               for name in (groups[0].named if groups else ())}
    filled = {name: np.where(np.isnan(x), undefined, x) for name, x in columns.items()}
    return {f"reward/{name}/mean": float(np.mean(x[~np.isnan(x)])) if not np.isnan(x).all() else float("nan")
            for name, x in filled.items()}


def make_requests(
    prompts: Sequence[Prompt], sampling: SamplingParams, n: int, seed: int, step: int, again: int = 0
) -> list[GenRequest]:
    """One request a prompt. Each seed is drawn from (run seed, step, position), so that a resumed run samples
    the same completions. `again`: the number of the round in a step with dynamic sampling, from 0."""
    return [make_request(p, sampling, n, seed, step, again, i) for i, p in enumerate(prompts)]


def make_request(prompt: Prompt, sampling: SamplingParams, n: int, seed: int, step: int, again: int,
                 index: int) -> GenRequest:
    """The request at place `index` of those that `make_requests` makes."""
    sequence = np.random.SeedSequence([seed, step, again] if again else [seed, step])
    name = f"{step}.{again}" if again else f"{step}"
    return GenRequest(f"{name}/{index}", prompt.token_ids, sampling, n,
                      int(sequence.generate_state(index + 1)[index]))


class Generates(Protocol):
    """The methods of a RolloutEngine that sample a batch."""

    def generate(self, requests: Sequence[GenRequest], /) -> list[list[Completion]]: ...

    def health(self) -> Health: ...


def generate(
    engine: Generates, prompts: Sequence[Prompt], requests: Sequence[GenRequest], version: int,
    unfit: Callable[[GenRequest, Completion], str | None] = lambda request, completion: None,
    cut: Callable[[GenRequest, Completion], Completion] = lambda request, completion: completion,
):
    """Sample the requests and separate the groups that cannot be learned from -> (kept, rejected).

    A group is rejected whole, because part of a group would have another baseline. It is rejected if a
    completion has missing, short or non-finite log-probabilities, was sampled at another weight version than
    `version`, or `unfit` returns a reason. The kept completions are shortened by `cut`
    (jaxfp8rl.rollout.stops). Raises EngineUnhealthy if no group is left.
    """
    answers = zip(prompts, requests, engine.generate(requests), strict=True)
    found = sift([(*answer, range(version, version + 1)) for answer in answers], engine, unfit, cut)
    return [f for f in found if not isinstance(f, str)], tuple(f for f in found if isinstance(f, str))


Answer = tuple[Prompt, GenRequest, Sequence[Completion], range]
Kept = tuple[Prompt, tuple[Completion, ...]]


def sift(answers: Sequence[Answer], engine: Generates, unfit: Callable, cut: Callable) -> list[Kept | str]:
    """For each answer, with the range of versions that may have sampled it: the prompt and its completions,
    or why the group is rejected (`generate`). Raises EngineUnhealthy if no group is left."""
    found: list[Kept | str] = []
    for prompt, request, completions, versions in answers:
        problem = _problem(request, completions, versions, unfit)
        found.append(f"request {request.request_id}: {problem}" if problem
                     else (prompt, tuple(cut(request, c) for c in completions)))
    if answers and all(isinstance(f, str) for f in found):
        raise EngineUnhealthy(
            f"every group of the step was rejected; the first: {found[0]}; "
            f"engine health: {engine.health().detail or 'ok'}",
            "check the published weights; resume from the last checkpoint with --resume",
        )
    return found


def _problem(request: GenRequest, completions: Sequence[Completion], versions: range,
             unfit: Callable) -> str | None:
    if len(completions) != request.n:
        return f"{len(completions)} completions instead of {request.n}"
    for c in completions:
        if found := c.problem() or unfit(request, c):
            return f"completion {c.index}: {found}"
        if c.finish_reason == "abort":
            return f"completion {c.index}: the engine aborted it"
        if any(span.version not in versions for span in c.version_spans) or not _is_covered(c):
            expected = f"{versions[0]}" + f" to {versions[-1]}" * (len(versions) > 1)
            return f"completion {c.index}: sampled at weight versions {c.version_spans}, expected {expected}"
    return None


def _is_covered(c: Completion) -> bool:
    """Whether the spans of versions cover every token once, in order, and no version precedes an older
    one."""
    ends = [0, *(span.stop for span in c.version_spans)]
    ordered = sorted(c.version_spans, key=lambda span: span.version) == list(c.version_spans)
    return ordered and ends[-1] == len(c.token_ids) and ends[:-1] == [s.start for s in c.version_spans]


def score(
    kept: Sequence[tuple[Prompt, tuple[Completion, ...]]], tokenizer: Tokenizer, rewards: RewardRunner,
    think_tags: Sequence[str] = THINK_TAGS,
) -> list[Group]:
    """Decode and score every completion.

    If a prompt ends with an open tag of `think_tags`, the tag is put before its completions. Raises DataError
    if no completion at all has a score, since neither training nor an evaluation could use the step.
    """
    texts = [[tokenizer.completion_text(c.token_ids) for c in completions] for _, completions in kept]
    tags = [thinks_on(tokenizer.decode(p.token_ids[-THINK_TOKENS:], False), think_tags) for p, _ in kept]
    flat = [(prompt.problem, tag + text) for (prompt, _), tag, group in zip(kept, tags, texts)
            for text in group]
    scores = rewards.score(flat)
    if all(s.value is None for s in scores):
        why, times = collections.Counter(s.why for s in scores).most_common(1)[0]
        problem, first = flat[0]
        example = completion_lines({"prompt": problem.prompt, "completion": first, "answer": problem.answer},
                       "  for example:")
        raise DataError(f"none of {len(scores)} completions could be scored; {times} times: {why}\n{example}",
                        "score one by hand (docs/tasks.md); continue a run with --resume")
    rest = iter(scores)
    return [Group(*pair, tuple(group), **_rewards([next(rest) for _ in group]))
            for pair, group in zip(kept, texts)]


def _rewards(scores: Sequence[Score]) -> dict[str, Any]:
    """The fields of a Group that come from its completions' scores."""
    column = lambda values: np.array([np.nan if value is None else value for value in values])
    names = dict.fromkeys(name for s in scores for name in s.parts)
    malformed = sum(s.why.startswith("malformed") for s in scores)
    named = {name: column([s.parts.get(name) for s in scores]) for name in names}
    return {"rewards": column([s.value for s in scores]), "named": named, "malformed": malformed}


def choose(rounds: Sequence[Rollouts], wanted: int) -> Rollouts:
    """Join the rounds of a dynamically sampled step, and choose the first `wanted` groups whose rewards
    differ."""
    groups = tuple(g for r in rounds for g in r.groups)
    useful = informative_groups([g.rewards for g in groups])
    chosen = tuple(g for g, keep in zip(groups, useful) if keep)[:wanted]
    return Rollouts(groups, tuple(why for r in rounds for why in r.rejected), chosen)


def to_samples(groups: Sequence[Group], loss: Loss, max_new_tokens: int,
               version: int = 0) -> list[list[Sample]]:
    """The completions of each group with their advantages, ready to pack. Groups may differ in size.

    Rewards are first shaped for length. Under loss.mask_cut, a cut completion is left out but counts in the
    group's baseline. A completion without a score is left out and does not count in the baseline.
    `version`: that of the weights before the step, from which the ages of tokens are counted.
    """
    shaped = [g.rewards + overlong(g, loss, max_new_tokens) for g in groups]
    return [
        [
        Sample(g.prompt.token_ids, c.token_ids, c.logprobs, float(a), c.routed_experts,
               support=support_of(c), ages=ages_of(c, version) if loss.needs_ages else None)
        for c, a, reward in zip(g.completions, group, g.rewards)
        if not (np.isnan(reward) or (loss.mask_cut and c.finish_reason == "length"))
        ]
        for g, group in zip(groups, advantages(shaped, loss.advantage, loss.pass_at_k))
    ]


def ages_of(c: Completion, version: int) -> np.ndarray:
    """By how many versions `version` is newer than the weights that sampled each token [T] float32."""
    lengths = [span.stop - span.start for span in c.version_spans]
    return np.repeat(np.array([version - span.version for span in c.version_spans], np.float32), lengths)


def support_of(c: Completion) -> tuple[np.ndarray, np.ndarray] | None:
    if c.support_ids is None or c.support_sizes is None:
        return None
    return c.support_ids, c.support_sizes


def overlong(group: Group, loss: Loss, max_new_tokens: int) -> np.ndarray:
    """The length penalties of the group's completions [n], each at most 0."""
    if not loss.overlong_buffer:
        return np.zeros(len(group.completions))
    lengths = np.array([len(c.token_ids) for c in group.completions])
    return overlong_penalty(lengths, max_new_tokens, loss.overlong_buffer, loss.overlong_penalty)
