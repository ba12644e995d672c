"""What a step learns from of what it has drawn."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from rollout_world import PROMPTS

from bridges.api import Completion, VersionSpan
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import pack
from jaxfp8rl.rollout.scored_groups import Group, Rollouts, to_samples
from jaxfp8rl.rollout.selected import selected

REWARDS = [[1, 0, 0, 1], [0, 0, 0, 0], [0, 1, np.nan, 1], [1, 0, 0, 0]]


def completion(group: int, i: int) -> Completion:
    tokens = np.arange(1 + group + i, dtype=np.int32)
    reason = "length" if (group, i) == (3, 0) else "stop"
    return Completion(f"{group}", i, tokens, -tokens / 7, reason, (VersionSpan(0, len(tokens), 4),))


def batch(rewards=REWARDS) -> Rollouts:
    groups = tuple(Group(PROMPTS[g], tuple(completion(g, i) for i in range(len(r))), ("",) * len(r),
                         np.array(r, float))
                   for g, r in enumerate(rewards))
    return Rollouts(groups, (), groups)


def taken(*words: str, rewards=REWARDS, step=5):
    cfg = load_config("demo", ["--run.dir", "runs/x", "--rollout.prompts_per_step", "4",
                               "--rollout.samples_per_prompt",
                               "4", *words])
    drawn = batch(rewards)
    found = selected(drawn, cfg, step)
    return found, to_samples(drawn.chosen, cfg.loss, 9, 4, found.units, found.advantages), cfg


def parts(samples) -> list:
    return [[(s.prompt, s.completion.tolist(), s.logprobs.tolist(), s.advantage, s.weights is None)
             for s in unit]
            for unit in samples]


@pytest.mark.parametrize("words", [(), ("--loss.mask_cut", "true"), ("--loss.overlong_buffer", "2")])
@pytest.mark.parametrize("all_", [(), ("--selection.keep", "4"),
                                  ("--selection.keep", "4", "--selection.weights", "inverse")])
def test_to_select_everything_is_not_to_select_in_bits(words, all_):
    found, samples, cfg = taken(*words, *all_)
    assert parts(samples) == parts(to_samples(batch().chosen, cfg.loss, cfg.rollout.max_new_tokens, 4))
    assert found.metrics["trained/distinct"] == 1 and found.metrics["trained/weights_ess"] == 1


def test_advantages_are_taken_over_all_or_over_those_kept():
    """The rare success counts more among all (Sol-RL's baseline is over the kept)."""
    best = lambda baseline: max(s.advantage
                                for s in taken("--selection.keep", "2", "--selection.baseline", baseline,
                                                           rewards=[[1, 0, 0, 0]])[1][0])
    assert best("all") == pytest.approx(3**0.5) and best("kept") == pytest.approx(1)


def test_the_lengths_of_what_was_learned_from_stand_beside_those_that_were_drawn():
    found, samples, _ = taken("--selection.keep", "2")
    lengths = [len(s.completion) for unit in samples for s in unit]
    assert found.metrics["trained/completions"] == len(lengths) == 8
    assert found.metrics["trained/length_mean"] == np.mean(lengths)
    assert found.metrics["trained/distinct"] == 8 / 15
    drawn = batch().metrics()
    every = [len(c.token_ids) for g in batch().groups for c in g.completions]
    assert [drawn[f"response/length_p{p}"] for p in (10, 50, 90)] == np.percentile(every,
                                                                                   [10, 50, 90]).tolist()


def test_what_has_no_advantage_is_not_replayed_and_pairs_stay_together():
    found, samples, _ = taken("--selection.keep", "4", "--selection.replay", "pairs",
                              rewards=[[1, 0, 0, 1], [0] * 4])
    assert len(samples) == 4 and all(u.group == 0 for u in found.units)
    assert all(sum(s.advantage for s in unit) == pytest.approx(0, abs=1e-6) for unit in samples)
    assert found.metrics["trained/distinct"] == 0.5


def test_weights_are_those_of_the_losses_and_a_step_draws_its_own():
    words = "--selection.keep", "2", "--selection.weights", "inverse"
    found, samples, _ = taken(*words, rewards=[[1, 0, 0, 0]])
    weights = {s.advantage > 0: float(s.weights[0]) for s in samples[0]}
    assert weights == {True: 0.5, False: 1.5} and found.metrics["trained/weights_ess"] == pytest.approx(0.8)
    ones = [[1, 0, 0, 0]] * 4
    assert taken(*words, rewards=ones,
                 step=5)[0].units == found.units + taken(*words, rewards=ones, step=5)[0].units[1:]
    assert taken(*words, rewards=ones, step=6)[0].units != taken(*words, rewards=ones, step=5)[0].units


def test_the_shape_of_a_batch_does_not_depend_on_the_weights_that_were_drawn():
    found, samples, cfg = taken("--selection.weights", "inverse", "--selection.keep", "3",
                                rewards=[[1, 0, 0]])
    assert all(s.weights is None for unit in samples for s in unit)
    batch = pack(sum(samples, []), 64, 1, 1, weighted=cfg.selection.weighs)
    assert batch.loss_weights is not None and set(batch.loss_weights[batch.response_mask]) == {1.0}
    assert pack([], 64, 1, 1, weighted=True).loss_weights is not None


def test_groups_that_were_sought_have_the_weight_of_their_share():
    """Three of five drawn teach; two are wanted, and the second stands at the third place: (2 - 1) / (3 -
    1)."""
    drawn = batch([[1, 0], [0, 0], [0, 1], [1, 1], [0, 1]])
    cfg = load_config("demo", ["--run.dir", "runs/x", "--rollout.prompts_per_step", "2",
                               "--rollout.samples_per_prompt", "2",
                               "--loss.dynamic_sampling_rounds", "3", "--selection.weights", "inverse"])
    chosen = dataclasses.replace(drawn, chosen=(drawn.groups[0], drawn.groups[2]))
    assert {w for u in selected(chosen, cfg, 1).units for w in u.weights} == {0.5}


def test_a_completion_that_could_not_have_been_selected_is_counted():
    assert taken("--selection.keep", "2",
                 rewards=[[0, 0.5, 0.75, 1]])[0].metrics["trained/unreachable"] == 0.5
    assert taken("--selection.keep", "2", "--selection.explore", "0.1",
                 rewards=[[0, 0.5, 0.75, 1]])[0].metrics["trained/unreachable"] == 0
