"""Requests, scored groups of completions, and their samples: the steps from problems to a packed batch."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from bridges.api import Completion, EngineUnhealthy, GenRequest, SamplingParams
from jaxfp8rl.config.learning import Loss
from jaxfp8rl.data.packing import Sample
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.tokenizer import Tokenizer
from jaxfp8rl.environments.metrics import turn_metrics
from jaxfp8rl.environments.mixture import WHERE as ENVIRONMENT
from jaxfp8rl.environments.player import Generates, ProblemRequest
from jaxfp8rl.environments.trajectory import Branch, Trajectory, sampled_of, tokens_sampled
from jaxfp8rl.errors import DataError
from jaxfp8rl.losses.advantages import informative_groups, overlong_penalty
from jaxfp8rl.losses.selection import Unit
from jaxfp8rl.monitors.end.extremes import completion_lines
from jaxfp8rl.rewards.runner import RewardRunner, Score
from jaxfp8rl.rollout import support
from jaxfp8rl.rollout.turn_advantages import advantages_of
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
    learn from; `drawn`: the metrics of the queue and of the curriculum that they come from, if there are
    such."""

    groups: tuple[Group, ...]
    rejected: tuple[str, ...]
    chosen: tuple[Group, ...]
    drawn: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hollow: bool = False  # the tokens are in another process (jaxfp8rl.rollout.shared_batches)

    def with_drawn(self, drawn: Mapping[str, float]) -> Rollouts:
        return dataclasses.replace(self, drawn=drawn)

    def metrics(self) -> dict[str, float]:
        """The metrics reward/*, response/*, rollout/*, support/*, turns/*, queue/*, curriculum/* and
        tokens/rollout."""
        rewards = np.concatenate([g.rewards for g in self.groups])
        completions = [c for g in self.groups for c in g.completions]
        lengths = np.array([tokens_sampled(c) for c in completions])
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
            "response/length_max": int(lengths.max()), **length_parts("response", lengths),
            "response/cut_fraction": float(np.mean([c.finish_reason == "length" for c in completions])),
            "rollout/groups_rejected": len(self.rejected),
            "rollout/groups_chosen": len(self.chosen),
            "tokens/rollout": int(lengths.sum()), **support.metrics(completions), **turn_metrics(completions),
            **self.drawn,
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


def length_parts(of: str, lengths: np.ndarray) -> dict[str, float]:
    """The 10th, 50th and 90th percentile of lengths."""
    return {f"{of}/length_p{p}": float(np.percentile(lengths, p)) for p in (10, 50, 90)}


def named_means(groups: Sequence[Group], undefined: float = np.nan) -> dict[str, float]:
    """The mean of each named reward over its completions. A completion without a value counts as `undefined`;
    NaN leaves it out."""
    names = dict.fromkeys(name for g in groups for name in g.named)
    columns = {name: np.concatenate([g.named[name] for g in groups if name in g.named]) for name in names}
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
    return ProblemRequest(f"{name}/{index}", prompt.token_ids, sampling, n,
                          int(sequence.generate_state(index + 1)[index]), problem=prompt.problem)


def generate(
    engine: Generates, prompts: Sequence[Prompt], requests: Sequence[GenRequest], version: int,
    unfit: Callable[[GenRequest, Completion], str | None] = lambda request, completion: None,
    cut: Callable[[GenRequest, Completion], Completion] = lambda request, completion: completion,
):
    """Sample the requests and separate the groups that cannot be learned from -> (kept, rejected).

    A group is rejected whole, because part of a group would have another baseline. It is rejected if a
    completion has missing, short or non-finite log-probabilities, was sampled at another weight version than
    `version`, or `unfit` returns a reason. The kept completions are shortened by `cut`
    (jaxfp8rl.rollout.stops); the turns of trajectories have been, one by one. Raises EngineUnhealthy if no
    group is left.
    """
    answers = zip(prompts, requests, engine.generate(requests), strict=True)
    found = sift([(*answer, range(version, version + 1)) for answer in answers], engine, unfit, cut)
    return [f for f in found if not isinstance(f, str)], tuple(f for f in found if isinstance(f, str))


Answer = tuple[Prompt, GenRequest, Sequence[Completion], range]
Kept = tuple[Prompt, tuple[Completion, ...]]


def commonest_share(kept: Sequence[Kept]) -> float:
    """The share of completions whose sampled tokens are those of the commonest one; 0 without completions."""
    counts = collections.Counter(np.asarray(c.token_ids)[sampled_of(c)].tobytes()
                                 for _, completions in kept for c in completions)
    return max(counts.values(), default=0) / max(1, counts.total())


def sift(answers: Sequence[Answer], engine: Generates, unfit: Callable, cut: Callable) -> list[Kept | str]:
    """For each answer, with the range of versions that may have sampled it: the prompt and its completions,
    or why the group is rejected (`generate`). Raises EngineUnhealthy if no group is left."""
    found: list[Kept | str] = []
    for prompt, request, completions, versions in answers:
        problem = _problem(request, completions, versions, unfit)
        found.append(f"request {request.request_id}: {problem}" if problem
                     else (prompt, tuple(c if isinstance(c, Trajectory) else cut(request, c)
                                         for c in completions)))
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
        if isinstance(c, Trajectory) and c.last is None:  # its environment failed before the first turn
            continue
        if found := c.problem() or unfit(request, c):
            return f"completion {c.index}: {found}"
        if c.finish_reason == "abort":
            return f"completion {c.index}: the engine aborted it"
        if any(span.version not in versions for span in c.version_spans) or not _is_covered(c):
            expected = f"{versions[0]}" + f" to {versions[-1]}" * (len(versions) > 1)
            return f"completion {c.index}: sampled at weight versions {c.version_spans}, expected {expected}"
    return None


def _is_covered(c: Completion) -> bool:
    """Whether the spans of versions cover every sampled token once, in order, and no version precedes an
    older one."""
    ordered = sorted(c.version_spans, key=lambda span: (span.version, span.start)) == list(c.version_spans)
    covered = np.zeros(len(c.token_ids), int)
    for span in c.version_spans:
        covered[span.start : span.stop] += 1
    whole = all(0 <= s.start < s.stop <= len(covered) for s in c.version_spans)
    return ordered and whole and bool((covered == sampled_of(c)).all())


def score(
    kept: Sequence[tuple[Prompt, tuple[Completion, ...]]], tokenizer: Tokenizer, rewards: RewardRunner,
    think_tags: Sequence[str] = THINK_TAGS,
) -> list[Group]:
    """Decode and score every completion. Of a trajectory the last turn is scored, and what its environment
    gave the turns is added; it has no score if its environment failed.

    If a prompt ends with an open tag of `think_tags`, the tag is put before its completions. Raises DataError
    if no completion at all has a score, since neither training nor an evaluation could use the step.
    """
    texts = [[text_of(c, tokenizer) for c in completions] for _, completions in kept]
    tags = [thinks_on(tokenizer.decode(p.token_ids[-THINK_TOKENS:], False), think_tags) for p, _ in kept]
    last = lambda c, text: text_of(c.last, tokenizer) if isinstance(c, Trajectory) else text
    flat = [(prompt.problem, tag + last(c, text))
            for (prompt, completions), tag, group in zip(kept, tags, texts)
            for c, text in zip(completions, group)]
    played = ((p.problem, c) for p, completions in kept for c in completions)
    scores = [_with_turns(s, *pc) for s, pc in zip(rewards.score(flat), played, strict=True)]
    if all(s.value is None for s in scores):
        why, times = collections.Counter(s.why for s in scores).most_common(1)[0]
        problem, first = flat[0]
        example = completion_lines({"prompt": problem.prompt, "completion": first, "answer": problem.answer},
                       "  for example:")
        by_hand = ("play one by hand (docs/turns.md), or raise environment.timeout_s if it is slow"
                   if isinstance(kept[0][1][0], Trajectory) else "score one by hand (docs/tasks.md)")
        raise DataError(f"none of {len(scores)} completions could be scored; {times} times: {why}\n{example}",
                        f"{by_hand}; continue a run with --resume")
    rest = iter(scores)
    return [Group(*pair, tuple(group), **_rewards([next(rest) for _ in group]))
            for pair, group in zip(kept, texts)]


def text_of(c: Completion | None, tokenizer: Tokenizer) -> str:
    """The text of a completion without the token that ended it, or of all tokens of a trajectory."""
    if isinstance(c, Trajectory):
        return tokenizer.decode(c.token_ids, skip_special_tokens=False)
    return "" if c is None else tokenizer.completion_text(c.token_ids)


def _with_turns(score: Score, problem: Problem, c: Completion) -> Score:
    """The score with the rewards of a trajectory's turns; undefined if its environment failed. Of several
    environments, each has a named reward."""
    if not isinstance(c, Trajectory):
        return score
    value = None if c.failed or score.value is None else score.value + sum(c.rewards)
    parts = {problem.meta[ENVIRONMENT]: value} if ENVIRONMENT in problem.meta else {}
    why = f"environment {c.end}" if c.failed else score.why
    return Score(value, why, score.parts | parts)


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


def to_samples(groups: Sequence[Group], loss: Loss, max_new_tokens: int, version: int = 0,
               units: Sequence[Unit] | None = None,
               advantages: Sequence[Sequence[np.ndarray]] = ()) -> list[list[Sample]]:
    """The completions of each unit with their advantages, ready to pack; without `units`, of each group.

    Rewards are first shaped for length. Under loss.mask_cut, a cut completion is left out but counts in the
    group's baseline. A completion without a score is left out and does not count in the baseline.
    `version`: that of the weights before the step, from which the ages of tokens are counted.
    """
    if units is None:
        units = [Unit.whole(i, learnable(g, loss)) for i, g in enumerate(groups)]
        advantages = advantages_of(groups, [shaped_rewards(g, loss, max_new_tokens) for g in groups], loss)
    since = version if loss.needs_ages else None
    return [[sample if weight == 1 else _weighed(sample, weight)
             for i, weight in zip(u.members, u.weights)
             for sample in samples_of(groups[u.group].prompt, groups[u.group].completions[i],
                                      advantages[u.group][i], since)]
            for u in units]


def learnable(g: Group, loss: Loss) -> np.ndarray:
    """[n]: the completions of a group that can be learned from."""
    cut = np.array([c.finish_reason == "length" for c in g.completions], bool)
    return ~np.isnan(g.rewards) & ~(cut & loss.mask_cut)


def shaped_rewards(g: Group, loss: Loss, max_new_tokens: int) -> np.ndarray:
    return g.rewards + overlong(g, loss, max_new_tokens)


def _weighed(s: Sample, weight: float) -> Sample:
    return s._replace(weights=np.full(len(s.completion), weight, np.float32))


def samples_of(prompt: Prompt, c: Completion, advantage: np.ndarray | None = None,
               version: int | None = None) -> list[Sample]:
    """A completion as a sample, or a trajectory as one for each branch. advantage: of each turn; None for 0.
    version: to count ages from; None for none."""
    ages = lambda part: None if version is None else ages_of(part, version)
    if not isinstance(c, Trajectory):
        value = 0.0 if advantage is None else float(advantage[0])
        return [Sample(prompt.token_ids, c.token_ids, c.logprobs, value, c.routed_experts,
                       support=support_of(c),
                       ages=ages(c))]
    values = iter(np.zeros(len(c.turns)) if advantage is None else advantage)
    by_token = [np.concatenate([np.full(len(s.token_ids), next(values) if s.completion else 0.0, np.float32)
                                for s in b.segments]) for b in c.branches]
    return [Sample(b.prompt, b.token_ids, b.logprobs, a, support=b.support, ages=ages(b), sampled=b.sampled)
            for b, a in zip(c.branches, by_token)]


def ages_of(c: Completion | Branch, version: int) -> np.ndarray:
    """By how many versions `version` is newer than the weights that sampled each token [T] float32; 0 for
    tokens from outside."""
    ages = np.zeros(len(c.token_ids), np.float32)
    for span in c.version_spans:
        ages[span.start : span.stop] = version - span.version
    return ages


def support_of(c: Completion) -> tuple[np.ndarray, np.ndarray] | None:
    if c.support_ids is None or c.support_sizes is None:
        return None
    return c.support_ids, c.support_sizes


def overlong(group: Group, loss: Loss, max_new_tokens: int) -> np.ndarray:
    """The length penalties of the group's completions [n], each at most 0."""
    if not loss.overlong_buffer:
        return np.zeros(len(group.completions))
    lengths = np.array([len(c.token_ids) for c in group.completions])  # what counts towards the limit
    return overlong_penalty(lengths, max_new_tokens, loss.overlong_buffer, loss.overlong_penalty)
