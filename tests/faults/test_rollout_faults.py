"""An engine that misbehaves: what is rejected, what is counted, what stops the run, and what is said."""

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import stand_in
from faulty_engine import Faults

from benchmarks.common import CORRECTIONS
from bridges.api import EngineDirty, EngineUnhealthy, SamplingParams, VersionSpan
from bridges.engines.fake_engine import FakeEngine
from jaxfp8rl.config.learning import Loss
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.dataset import prepare
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.tasks import make_task
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.errors import ConfigError, DataError
from jaxfp8rl.policy.warnings import uncorrected_warning
from jaxfp8rl.rewards.runner import Score
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.scored_groups import Prompt, Rollouts

SAMPLING = SamplingParams(max_tokens=6)
PROMPTS = [Prompt(Problem(f"p{i}", "1+1=", "2"), (1, 2, 3 + i)) for i in range(4)]
REQUESTS = scored_groups.make_requests(PROMPTS, SAMPLING, 3, seed=0, step=7)


published = functools.partial(stand_in.published, version=5, scale=0.1)


class OneBad(FakeEngine):
    """A healthy engine but for the completion (1, 2), which `spoil` replaces."""

    spoil = staticmethod(lambda c: c)

    def generate(self, requests):
        groups = super().generate(requests)
        groups[1][2] = self.spoil(groups[1][2])
        return groups


def at(position: int, value: float):
    def spoil(c):
        values = c.logprobs.copy()
        values[position] = value
        return dataclasses.replace(c, logprobs=values)

    return spoil


SPOILT = {
    "missing": (lambda c: dataclasses.replace(c, logprobs=None), "6 tokens but none log-probabilities"),
    "short": (lambda c: dataclasses.replace(c, logprobs=c.logprobs[:-1]), "6 tokens but 5 log-probabilities"),
    "nan": (at(3, np.nan), "log-probability nan at token 3"),
    "infinite": (at(0, -np.inf), "log-probability -inf at token 0"),
    "positive": (at(2, 0.5), "log-probability 0.5 above 0 at token 2"),
    "empty": (lambda c: dataclasses.replace(c, token_ids=c.token_ids[:0], logprobs=c.logprobs[:0]),
              "no tokens"),
    "aborted": (lambda c: dataclasses.replace(c, finish_reason="abort"), "the engine aborted it"),
    "stale": (lambda c: dataclasses.replace(c, version_spans=(VersionSpan(0, 2, 4), VersionSpan(2, 6, 5))),
              "expected 5"),
    "no version": (lambda c: dataclasses.replace(c, version_spans=()), "expected 5"),
}


@pytest.mark.parametrize("kind", SPOILT)
def test_one_bad_completion_costs_its_group_and_no_other(kind):
    engine = published(kind=OneBad)
    engine.spoil, why = SPOILT[kind]
    kept, rejected = scored_groups.generate(engine, PROMPTS, REQUESTS, version=5)
    assert [p.problem.id for p, _ in kept] == ["p0", "p2", "p3"] and all(len(c) == 3 for _, c in kept)
    assert len(rejected) == 1 and rejected[0].startswith("request 7/1: completion 2: ") and why in rejected[0]
    groups = tuple(scored_groups.Group(p, c, ("",) * 3, np.array([0.0, 1.0, np.nan])) for p, c in kept)
    equal = dataclasses.replace(groups[0], rewards=np.full(3, 0.3))  # of which np.std is 6e-17
    assert Rollouts((*groups, equal), (), groups).metrics()["reward/groups_solved_in_part"] == 0.75
    metrics = Rollouts(groups, rejected, groups).metrics()
    assert metrics["rollout/groups_rejected"] == 1 and metrics["reward/undefined"] == 3 and metrics[
        "reward/mean"] == 0.5
    assert metrics["tokens/rollout"] == 3 * 3 * 6


def test_a_completion_without_a_score_is_not_learned_from():
    """Not with an advantage of 0: it would count as tokens of the update, in its KL and its entropy."""
    kept, _ = scored_groups.generate(published(), PROMPTS, REQUESTS, version=5)
    groups = [scored_groups.Group(p, c, ("",) * 3, np.array([0.0, 1.0, np.nan])) for p, c in kept]
    alone = [scored_groups.Group(p, c[:2], ("",) * 2, np.array([0.0, 1.0])) for p, c in kept]
    said = [[(s.advantage, *s.completion) for s in group]
            for group in scored_groups.to_samples(groups, Loss(), 8)]
    assert said == [[(s.advantage, *s.completion) for s in group]
                    for group in scored_groups.to_samples(alone, Loss(), 8)]
    assert all(len(group) == 2 for group in said)


def test_a_group_of_the_wrong_size_is_rejected():
    class Short(FakeEngine):
        def generate(self, requests):
            first, *rest = super().generate(requests)
            return [first[:2], *rest]

    kept, rejected = scored_groups.generate(published(kind=Short), PROMPTS, REQUESTS, version=5)
    assert len(kept) == 3 and rejected == ("request 7/0: 2 completions instead of 3",)


def test_when_nothing_can_be_scored_the_run_says_why_and_stops():
    """Else it would go on with advantages of 0."""
    scorer = SimpleNamespace(score=lambda items: [Score(None, "error: KeyError: 'difficulty'")] * 11
                             + [Score(None, "timeout")])
    kept, _ = scored_groups.generate(published(), PROMPTS, REQUESTS, version=5)
    tokenizer = load_tokenizer("chars:0123456789+=")
    with pytest.raises(DataError,
                       match="none of 12 completions could be scored; 11 times: error: "
                             "KeyError: 'difficulty'"):
        scored_groups.score(kept, tokenizer, scorer)
    scorer.score = lambda items: [Score(None, "timeout")] * 11 + [Score(1.0, "ok")]
    assert np.nansum([g.rewards for g in scored_groups.score(kept, tokenizer, scorer)]) == 1


def test_a_healthy_engine_loses_nothing():
    kept, rejected = scored_groups.generate(published(), PROMPTS, REQUESTS, version=5)
    assert [p for p, _ in kept] == PROMPTS and rejected == ()


@pytest.mark.parametrize("fault", ["missing", "short", "nan"])
def test_when_every_group_is_bad_the_engine_is_called_unhealthy(fault):
    engine = published(faults=Faults(logprobs=fault))
    with pytest.raises(EngineUnhealthy) as e:
        scored_groups.generate(engine, PROMPTS, REQUESTS, version=5)
    said = str(e.value)
    assert "every group of the step was rejected; the first: request 7/0: completion 0: " in said
    assert "engine health: " in said and engine.health().detail in said and "--resume" in e.value.next_step


def test_an_engine_that_missed_a_publish_is_found_by_the_version_of_its_tokens():
    with pytest.raises(EngineUnhealthy, match="sampled at weight versions .*version=4.*, expected 5"):
        scored_groups.generate(published(faults=Faults(stale_version=True)), PROMPTS, REQUESTS, version=5)


def test_an_engine_without_weights_does_not_answer():
    with pytest.raises(EngineDirty, match="publish"):
        scored_groups.generate(FakeEngine(), PROMPTS, REQUESTS, version=0)


def test_requests_of_a_step_have_their_own_seeds_and_a_resumed_run_the_same_ones():
    again = scored_groups.make_requests(PROMPTS, SAMPLING, 3, seed=0, step=7)
    assert again == REQUESTS
    seeds = {r.seed for step in range(20) for r in scored_groups.make_requests(PROMPTS, SAMPLING, 3, 0, step)}
    assert len(seeds) == 80 and not seeds & {r.seed
                                             for r in scored_groups.make_requests(PROMPTS, SAMPLING, 3, 1, 7)}


def test_the_benchmark_of_corrections_asks_for_its_baseline_by_name():
    corrected = {name: load_config("demo", words).correction.resolve().corrects
                 for name, words in CORRECTIONS.items()}
    assert corrected.pop("none") is False and all(corrected.values())


BASELINE = ["--correction.allow_uncorrected_fp8", "true"]


@pytest.mark.parametrize("recipe", ["fp8_rollout", "fp8_unified", "fp8_forward"])
def test_fp8_rollouts_without_a_correction_are_refused_by_key(recipe):
    with pytest.raises(ConfigError, match='correction.preset = "none"') as e:
        load_config("demo", ["--precision.recipe", recipe, "--correction.preset", "none"])
    assert 'set correction.preset = "token_tis"; or, ' in e.value.next_step
    baseline = load_config("demo", ["--precision.recipe", recipe, "--correction.preset", "none", *BASELINE])
    assert "corrects nothing (correction.allow_uncorrected_fp8)" in uncorrected_warning(baseline)
    assert uncorrected_warning(load_config("demo", ["--precision.recipe", recipe, *BASELINE])) is None
    load_config("demo", ["--precision.recipe", "bf16", "--correction.preset", "none"])


def test_prompts_that_are_empty_or_too_long_stop_the_start_or_are_counted():
    tokenizer = load_tokenizer("chars:0123456789+=")
    problems = [Problem("good", "1+2=", "3"), Problem("long", "1+2+3+4=", "10"), Problem("empty", "", "0")]
    with pytest.raises(DataError) as e:
        prepare(problems, tokenizer, 4)
    assert '"long": 8 tokens, the limit is 4' in str(e.value) and '"empty": the prompt has no tokens' in str(
        e.value)
    cfg = load_config("demo", ["--task.skip_bad_rows", "true"])  # of a generator, too
    assert len(make_task(cfg.task, seed=0).problems()) > 0
    kept, report = prepare(problems, tokenizer, 4, skip=True)
    assert [p.id for p, _ in kept] == ["good"] and (report.kept, report.too_long, report.empty) == (1, 1, 1)
    with pytest.raises(DataError, match="2 of 2 prompts cannot be used"):
        prepare(problems[1:], tokenizer, 4, skip=True)
