"""Trajectories from an engine and environments: their tokens, how they end, and what the learner makes of
them."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from chat_templates import tokenizer
from stand_in import published

from bridges.api import Completion, GenRequest, SamplingParams, VersionSpan
from bridges.engines.fake_engine import FakeEngine
from jaxfp8rl.config.learning import Loss
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.environments.calculator import calculator
from jaxfp8rl.environments.metrics import turn_metrics
from jaxfp8rl.environments.player import Player
from jaxfp8rl.environments.pool import Pool
from jaxfp8rl.environments.tools import schema_of
from jaxfp8rl.environments.trajectory import Branch, Segment, Trajectory, trajectory
from jaxfp8rl.environments.world import World
from jaxfp8rl.errors import DataError
from jaxfp8rl.losses.correction import rollout_correction
from jaxfp8rl.losses.presets import get_preset
from jaxfp8rl.rewards.runner import Score
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.completion_json import completion_from_json, completion_to_json
from jaxfp8rl.rollout.scored_groups import Group, Prompt, Rollouts, samples_of, to_samples

TOKENIZER = load_tokenizer("chars:?123456789+-")  # <pad> 0, <eos> 1, "?" 2, "1" 3 ...
PROMPT = (2,)
HERE = str(Path(__file__).parent)
GUESS = World("guess", {"largest": 7}, 0, "", 5.0, 100)


@pytest.fixture(scope="module")
def pool():
    pool = Pool(GUESS, workers=1)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def odd():
    pool = Pool(World("odd_environment.py:Odd", {}, 0, HERE, 2.0, 100), workers=1)
    yield pool
    pool.close()


def engine(replies=(), version: int = 3) -> FakeEngine:
    return published(16, 4, max_model_len=64, replies=replies, weights=1, version=version)


def requests(answers, n: int = 1, tokens: int = 9, **sampling) -> list[GenRequest]:
    how = SamplingParams(tokens, stop_token_ids=(1,), **sampling)
    prompts = [Prompt(Problem(a, "?", a), PROMPT) for a in answers]
    return scored_groups.make_requests(prompts, how, n, 0, 1)


def player(engine, pool, max_turns: int = 4, turn_tokens: int = 1, lanes: int = 1) -> Player:
    return Player(engine, pool, TOKENIZER, lambda request, completion: completion, max_turns, turn_tokens,
                  lanes)


def text(ids) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=False)


def test_a_game_is_played_turn_by_turn(pool):
    [[c]] = player(engine([[6], [8], [7]]), pool).generate(requests(["5"]))  # "4", "6", "5"
    assert isinstance(c, Trajectory) and text(c.token_ids) == "4+6-5" and c.end == "done"
    assert c.sampled.tolist() == [True, False, True, False, True]
    assert c.rewards == (0.0, 0.0, 1.0) and c.turns == ((0, 1), (2, 3), (4, 5)) and c.finish_reason == "stop"
    assert [(s.start, s.stop, s.version) for s in c.version_spans] == [(0, 1, 3), (2, 3, 3), (4, 5, 3)]
    assert (c.logprobs[~c.sampled] == 0).all() and (c.logprobs[c.sampled] < 0).all()
    assert c.problem() is None and text(c.last.token_ids) == "5"


def test_one_turn_is_what_the_engine_samples_without_an_environment(pool):
    """To the bit: nothing is built twice."""
    asked = requests(["1", "5"], n=3)
    plain = engine().generate(asked)
    played = player(engine(), pool, max_turns=1, turn_tokens=0).generate(asked)
    for mine, theirs in zip(sum(played, []), sum(plain, [])):
        for name in ("token_ids", "logprobs"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
        assert (mine.version_spans, mine.finish_reason, mine.index, mine.request_id) == (
            theirs.version_spans, theirs.finish_reason, theirs.index, theirs.request_id)
        [a], [b] = (samples_of(Prompt(Problem("", "?", ""), PROMPT), c, np.array([0.5]), 3)
                    for c in (mine, theirs))
        packed = [pack([s], 16, 1, 1, ages=True) for s in (a, b)]
        for x, y in zip(*packed):
            np.testing.assert_array_equal(x, y)


def test_seeds_reproduce_trajectories_in_any_number_of_lanes(pool):
    asked = requests(["1", "5"], n=4)
    first, again = (player(engine(), pool, lanes=n).generate(asked) for n in (1, 2))
    assert [c.token_ids.tolist() for g in first for c in g] == [c.token_ids.tolist() for g in again
                                                                for c in g]
    assert len({tuple(c.token_ids.tolist()) for g in first for c in g}) > 2


@pytest.mark.parametrize("lanes", [1, 2])
def test_progress_is_told_after_each_round(pool, lanes):
    told, wrong = [], [[3]] * 20  # "1"
    how = player(engine([[7], *wrong]), pool, max_turns=3, lanes=lanes)  # "5": the first ends at once
    answers = how.generate(requests(["5", "5"]), lambda *counts: told.append(counts))
    assert sorted(len(c.rewards) for [c] in answers) == [1, 3]
    assert len(told) == (3 if lanes == 1 else 4) and told[-1] == (2, 2) and told[0][1] == 2
    assert [done for done, _ in told] == sorted(done for done, _ in told)


def test_limits_end_a_trajectory(pool):
    wrong = [[3]] * 20  # "1"
    [[c]] = player(engine(wrong), pool, max_turns=3).generate(requests(["5"]))
    assert (c.end, c.finish_reason, text(c.token_ids)) == ("turns", "stop", "1+1+1")
    [[c]] = player(engine(wrong), pool, max_turns=9).generate(requests(["5"], tokens=4))
    assert (c.end, c.finish_reason, text(c.token_ids)) == ("length", "length",
                                                           "1+1"), "the observation did not fit"
    [[c]] = player(engine([[3, 3, 3]]), pool, turn_tokens=0).generate(requests(["5"], tokens=3))
    assert (c.end, c.finish_reason, text(c.token_ids)) == ("length", "length",
                                                           "111"), "the turn itself was cut"


def test_what_an_environment_does_wrong_is_a_trajectory_without_a_score(odd):
    kinds = ["fine", "raise", "raise in reset", "nan", "never", "counted"]
    how = player(engine([[3]] * 20), odd, max_turns=2)
    found = [c for [c] in how.generate(requests(kinds))]
    prompts = [Prompt(Problem(k, "?", k), PROMPT) for k in kinds]
    kept = scored_groups.sift([(p, r, [c], range(3, 4)) for p, r, c in zip(prompts, requests(kinds), found)],
                              engine(), lambda r, c: None, None)
    assert not any(isinstance(k, str) for k in kept), kept
    rewards = type("Zero", (), {"score": lambda self, items: [Score(0.0, "ok")] * len(items)})()
    groups = scored_groups.score(kept, TOKENIZER, rewards)
    by_kind = {k: float(g.rewards[0]) for k, g in zip(kinds, groups)}
    assert by_kind["fine"] == 1 and by_kind["counted"] == 1 and by_kind["never"] == 0
    assert all(np.isnan(by_kind[k]) for k in ("raise", "raise in reset", "nan"))
    none = type("None", (), {"score": lambda self, items: [Score(None, "timeout")] * len(items)})()
    with pytest.raises(DataError, match=r"\n  next step: play one by hand .*environment.timeout_s"):
        scored_groups.score(kept[1:4], TOKENIZER, none)
    metrics = turn_metrics(found)
    assert (metrics["turns/errors"], metrics["turns/crashes"], metrics["turns/malformed_calls"]) == (3, 0, 2)
    assert metrics["turns/done_fraction"] == pytest.approx(2 / 6) and metrics["turns/max"] == 2
    rollouts = Rollouts(tuple(groups), (), tuple(groups))
    assert rollouts.metrics()["reward/undefined"] == 3 and rollouts.age(3)["staleness/versions_max"] == 0
    assert [len(s) for s in to_samples(groups, Loss(), 9, 3)] == [1, 0, 0, 0, 1, 1]


def test_a_tool_answers_and_the_task_scores_the_last_turn():
    """As Qwen2.5 writes calls. A malformed call is told to the model, and counted."""
    t = tokenizer("Qwen2.5").with_tools([schema_of(calculator)])
    question = ({"role": "user", "content": "How much is 3 * 4?"},)
    says = ["<tool_call>\n{</tool_call>",
            '<tool_call>\n{"name": "calculator", "arguments": {"expression": "3*4"}}\n'
            "</tool_call>", "It is 12"]
    replies = [t.encode(f"{text}<|im_end|>", add_special_tokens=False) for text in says]
    fake = published(t.vocab_size, 4, max_model_len=4096, replies=replies, weights=1, version=0)
    pool = Pool(World("", {}, 0, "", 5.0, 100, ("calculator",), "hermes"), workers=1)
    try:
        prompt = Prompt(Problem("p", question, "12"), tuple(t.apply_chat(question)))
        asked = scored_groups.make_requests([prompt], SamplingParams(999, stop_token_ids=t.eos_token_ids), 1,
                                            0, 1)
        [[c]] = Player(fake, pool, t, lambda request, completion: completion, 8, penalty=0.25).generate(asked)
    finally:
        pool.close()
    assert c.end == "done" and c.counts == {"tool_calls": 2, "malformed_calls": 1} and len(c.branches) == 1
    assert c.rewards == (-0.25, 0.0, 0.0)
    whole = t.decode([*prompt.token_ids, *c.token_ids.tolist()], skip_special_tokens=False)
    results = [text.partition("\n</tool_response>")[0] for text in whole.split("<tool_response>\n")[1:]]
    assert results[0].startswith("error: not JSON: ") and results[1:] == ["12"]
    assert c.token_ids[c.sampled].tolist() == sum(replies, [])
    scored = []
    rewards = type("Notes", (), {"score": lambda self, items: scored.extend(items) or [Score(0.5, "ok")]})()
    [group] = scored_groups.score([(prompt, (c,))], t, rewards)
    assert scored == [(prompt.problem, "It is 12")] and group.rewards.tolist() == [0.5 - 0.25]


def turn(ids, version: int = 3, logp: float = -0.5, support: bool = False) -> Segment:
    n = len(ids)
    among = (np.repeat(np.asarray(ids, np.int32), 1), np.ones(n, np.int32)) if support else (None, None)
    c = Completion("1/0", 0, np.asarray(ids, np.int32), np.full(n, logp, np.float32), "stop",
                   (VersionSpan(0, n, version),), None, *among)
    return Segment(c.token_ids, c)


def outside(*ids: int) -> Segment:
    return Segment(np.asarray(ids, np.int32))


def two_branches(**how) -> Trajectory:
    branches = [Branch.of((2, 2), [turn([3, 4], 2, **how), outside(9), turn([5], 3, **how)]),
                Branch.of((2, 6), [turn([7], 3, **how)])]
    return trajectory("1/0", 0, branches, "done", False, [0.25, 0.0, 0.5], {"tool_calls": 2})


def test_a_checkpoint_keeps_every_bit_of_a_trajectory():
    for c in (two_branches(), two_branches(support=True)):
        back = completion_from_json(json.loads(json.dumps(completion_to_json(c))))
        assert isinstance(back, Trajectory)
        assert json.dumps(completion_to_json(back)) == json.dumps(completion_to_json(c))
        for field in dataclasses.fields(c):
            if isinstance(getattr(c, field.name), np.ndarray):
                np.testing.assert_array_equal(getattr(back, field.name), getattr(c, field.name))
        assert (back.turns, back.version_spans, back.rewards) == (c.turns, c.version_spans, c.rewards)


def test_each_branch_is_a_row_that_learns_from_its_own_turns():
    group = Group(Prompt(Problem("", "?", ""), (2, 2)), (two_branches(), two_branches()), ("", ""),
                  np.array([1.0, 0.0]))
    loss = Loss(old_policy="loglinear")
    [samples] = to_samples([group], loss, 16, 4)
    assert [(tuple(s.prompt), s.completion.tolist(), s.sampled.tolist(), s.ages.tolist())
            for s in samples[:2]] == [
        ((2, 2), [3, 4, 9, 5], [True, True, False, True], [2, 2, 0, 1]), ((2, 6), [7], [True], [1])]
    assert samples[0].advantage.tolist() == [a := samples[1].advantage[0], a, 0,
                                             a] and a > 0 > samples[2].advantage[0]
    batch = pack(samples[:2], 16, 1, 1, ages=True)
    assert batch.tokens[0, 0, :9].tolist() == [2, 2, 3, 4, 9, 5, 2, 6, 7]
    assert batch.response_mask[0, 0, :9].tolist() == [False, False, True, True, False, True, False, False,
                                                      True]
    assert batch.segment_ids[0, 0, :9].tolist() == [1] * 6 + [2] * 3 and batch.positions[0, 0, 5] == 5
    given = ~batch.response_mask
    assert (batch.advantages[given] == 0).all() and (batch.ages[given] == 0).all()


def test_turns_have_the_advantages_of_their_returns():
    """Rewards 1/4, 0, 1/2 and 1/2 of the task against none and 1/4: by hand, with a discount of one half."""
    quick = trajectory("1/0", 1, [Branch.of((2, 2), [turn([3]), outside(9), turn([5])])], "done", False,
                       [0.0, 0.25], {})
    group = Group(Prompt(Problem("", "?", ""), (2, 2)), (two_branches(), quick), ("", ""),
                  np.array([1.25, 0.25]))
    loss = Loss(turn_advantages="returns", turn_discount=0.5, advantage="dr_grpo")
    [[first, second, third]] = to_samples([group], loss, 16)
    slow = [0.25 + 0.5 * (0 + 0.5 * 1.0), 0.5 * 1.0, 1.0]
    mean = [(slow[0] + 0.125) / 2, (slow[1] + 0.25) / 2]
    a, b = slow[0] - mean[0], slow[1] - mean[1]
    np.testing.assert_allclose(first.advantage, [a, a, 0, b], rtol=1e-6)
    assert second.advantage.tolist() == [0], "no other trajectory came so far"
    np.testing.assert_allclose(third.advantage, [-a, 0, -b], rtol=1e-6)


def test_a_support_leaves_tokens_from_outside_out():
    samples = samples_of(Prompt(Problem("", "?", ""), (2, 2)), two_branches(support=True), np.ones(3))
    batch = pack(samples, 16, 1, 1, support=4)
    assert batch.response_mask[0, 0, :9].tolist() == [False, False, True, True, False, True, False, False,
                                                      True]
    assert batch.support[0, 0, 2].tolist() == [3, -1, -1, -1] and (batch.support[0, 0, 4] == -1).all()


@pytest.mark.slow
def test_statistics_of_a_sequence_count_the_policys_tokens_alone():
    """Of a trajectory whose outside tokens are taken out, they are the same."""
    rng = np.random.default_rng(0)
    mask = np.array([True, True, False, True, False, False, True, True])
    s = Sample((2,), np.arange(3, 11), -rng.random(8).astype(np.float32), 1.0, sampled=mask)
    bare = Sample((2,), np.arange(3, 11)[mask], s.logprobs[mask], 1.0)
    old = rng.normal(0, 0.1, 8).astype(np.float32) + s.logprobs
    correct = jax.jit(functools.partial(rollout_correction, config=get_preset("verl/decoupled_seq_is")))

    def weights(sample, old):
        b = pack([sample], 12, 1, 1)
        whole = np.full(b.tokens.shape, 7.0, np.float32)  # what stands at masked places must not matter
        whole[0, 0, 1 : 1 + len(old)] = np.where(b.response_mask[0, 0, 1 : 1 + len(old)], old, np.nan)
        found = correct(whole, b.rollout_logp, b.response_mask, segment_ids=b.segment_ids)
        return np.asarray(found.weights)[b.response_mask], np.asarray(found.mask)[b.response_mask]

    for mine, theirs in zip(weights(s, old), weights(bare, old[mask])):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6)


def test_a_conversation_written_anew_is_a_new_branch_and_a_limit_gives_what_is_due():
    """With the tools of the environment, which the problem's prompt does not have."""
    t = tokenizer("Qwen2.5")
    replies = [t.encode(f"{word}<|im_end|>", add_special_tokens=False) for word in ("one", "two", "three")]
    fake = published(t.vocab_size, 4, max_model_len=4096, replies=replies, weights=1, version=0)
    question = ({"role": "user", "content": "a placeholder"},)
    prompt = Prompt(Problem("p", question, ""), tuple(t.apply_chat(question)))
    pool = Pool(World("anew_environment.py:Rewriting", {}, 0, HERE, 5.0, 999), workers=1)
    try:
        asked = scored_groups.make_requests([prompt], SamplingParams(999, stop_token_ids=t.eos_token_ids), 1,
                                            0, 1)
        [[c]] = Player(fake, pool, t, lambda request, completion: completion, 3).generate(asked)
    finally:
        pool.close()
    assert c.end == "turns" and c.rewards == (0.5, 0.0, 0.75) and len(c.branches) == 2
    assert c.token_ids[c.sampled].tolist() == sum(replies, [])
    first, second = (t.decode(b.prompt, skip_special_tokens=False) for b in c.branches)
    assert "Halve a number." in first and "You halve." in first and "placeholder" not in first
    assert "Halve a number." not in second and "you said two" in second
