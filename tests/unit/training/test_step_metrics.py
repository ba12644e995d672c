"""A step of several updates: how its groups are spread over them, and that its metrics are those of one
batch."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridges.api import Completion
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.errors import NonFiniteStep
from jaxfp8rl.losses.correction import CorrectionConfig, Rejection, rollout_correction
from jaxfp8rl.losses.mismatch import advantage_skew, mean_over
from jaxfp8rl.monitors.spikes import SpikeCounter
from jaxfp8rl.rollout.scored_groups import Group, Prompt, Rollouts
from jaxfp8rl.rollout.selected import selected
from jaxfp8rl.training import update_batches
from jaxfp8rl.training import updates as update
from jaxfp8rl.training.step_metrics import Counts, counts_of, of_step
from jaxfp8rl.training.updates import is_bad
from jaxfp8rl.types import TrainBatch, TrainState

pytestmark = pytest.mark.usefixtures("quick_compile")


def group(name: int, rewards: list[float]) -> Group:
    one = np.array([name]), np.zeros(1, np.float32), "stop", ()
    completions = tuple(Completion("r", i, *one) for i in range(len(rewards)))
    return Group(Prompt(Problem(str(name), "p", "a"), (1,)), completions, ("",) * len(rewards),
                 np.array(rewards))


def spread(groups: list[Group], prompts: int, updates: int) -> list[list[int]]:
    """The groups of each update, by name; asserts that none is cut."""
    words = {"rollout.prompts_per_step": prompts, "train.updates_per_step": updates, "optim.warmup_steps": 0}
    cfg = load_config("demo", [w for key, value in words.items() for w in (f"--{key}", str(value))])
    batch = Rollouts(tuple(groups), (), tuple(groups))
    shares = update_batches.split(batch, selected(batch, cfg, 1), SimpleNamespace(cfg=cfg), 0)
    names = [[int(s.completion[0]) for s in share] for share in shares]
    assert all(share.count(name) == len(groups[name].completions) for share in names for name in share)
    return [list(dict.fromkeys(share)) for share in names]


def test_seventeen_groups_over_four_updates_are_five_and_three_times_four():
    seventeen = [group(i, [0.0, 1.0]) for i in range(17)]
    assert [len(share) for share in spread(seventeen, 64, 4)] == [5, 4, 4, 4]
    assert spread(seventeen[:3], 64, 4) == [[0], [1], [2]]
    assert spread([], 64, 4) == [[]]  # one update of nothing, which is not applied


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_groups_are_spread_evenly_whole_and_in_order(updates, size, data):
    """Never more than an update's shape holds; a group of which nothing is left is none."""
    useful = data.draw(st.lists(st.booleans(), max_size=updates * size))
    groups = [group(i, [0.0, 1.0] if one else [math.nan, math.nan]) for i, one in enumerate(useful)]
    shares = spread(groups, updates * size, updates)
    assert sum(shares, []) == [i for i, one in enumerate(useful) if one]
    if any(useful):
        assert len(shares) == min(updates, sum(useful)) and {len(s) for s in shares} <= {
            len(shares[-1]), len(shares[-1]) + 1}
        assert max(map(len, shares)) <= size


def random_batch(rng: np.random.Generator, rows: int, signs: bool) -> tuple[TrainBatch, np.ndarray]:
    """(batch [1, 6, 24], old_logp) of two sequences in each of the first `rows` rows, any of whose tokens may
    be off the mask."""
    shape = (1, 6, 24)
    segments = np.broadcast_to(np.repeat([1, 2, 0], [10, 10, 4]), shape)
    mask = (segments > 0) & (rng.random(shape) < rng.random((1, 6, 1))) & (np.arange(6)[:, None] < rows)
    rollout = -rng.exponential(2, shape).astype(np.float32)
    old = rollout + rng.normal(0, 0.3, shape).astype(np.float32)
    advantages = rng.normal(size=shape).astype(np.float32) if signs else np.ones(shape, np.float32)
    return TrainBatch(segments, segments, segments, mask, rollout, advantages), old


CORRECTION = CorrectionConfig(rejections=(Rejection("token", "k1", lower=-0.5),
                                          Rejection("sequence", "k3", upper=0.08)))


@jax.jit
def metrics_of(batch: TrainBatch, old: jax.Array) -> dict[str, jax.Array]:
    fix = rollout_correction(old, batch.rollout_logp, batch.response_mask, CORRECTION, batch.segment_ids)
    facts = fix.metrics | advantage_skew(old, batch.rollout_logp, batch.advantages, batch.response_mask)
    facts |= {"entropy": mean_over(fix.mask, -old), "tokens/update": fix.mask.sum()}
    return facts


@given(st.lists(st.integers(0, 6), min_size=4, max_size=4), st.integers(0, 2**32 - 1), st.booleans())
def test_metrics_of_updates_of_any_size_are_those_of_one_batch(sizes, seed, signs):
    """But for the two that do not follow from their parts, and a smallest or largest of nothing."""
    rng = np.random.default_rng(seed)
    parts = [random_batch(rng, rows, signs) for rows in sizes]
    whole = TrainBatch(*(np.concatenate(fields, 1) for fields in list(zip(*(b for b, _ in parts)))[:6]))
    floats = lambda *batch: {key: float(value) for key, value in metrics_of(*batch).items()}
    want, rows = floats(whole,
                        np.concatenate([old for _, old in parts], 1)), [floats(*part) for part in parts]
    counts = [counts_of(b, row, True) for (b, _), row in zip(parts, rows)]
    found = of_step(rows, counts)
    assert found.keys() == want.keys()
    for key in want.keys() - {"mismatch/prob_correlation", "correction/raw_ess"}:
        assert found[key] == pytest.approx(want[key], rel=2e-4, abs=2e-5), key


def test_what_an_update_has_one_of_is_averaged_over_updates():
    one = {"loss": 1.0, "update/applied": 1.0, "update/loss_scale": 4.0, "update/bad_in_a_row": 0.0,
           "tokens/update": 30.0}
    other = {"loss": 3.0, "update/applied": 0.0, "update/loss_scale": 2.0, "update/bad_in_a_row": 1.0,
             "tokens/update": 0.0}
    counts = [Counts(30, 30, 30, 3, 3, 15, 15), Counts(10, 10, 10, 1, 1, 5, 5)]
    for first, second, last in ((one, other, 2.0), (other, one, 4.0)):
        assert of_step([first, second], counts) == {
            "loss": 2.0, "update/applied": 0.5, "update/loss_scale": last, "update/bad_in_a_row": 1.0,
            "tokens/update": 30.0,
        }


@pytest.mark.parametrize(
    "loss, norm, overflow, bad",
    [(0.0, 0.0, 0, False), (math.nan, 0.0, 0, True), (0.0, math.nan, 0, True), (1.0, math.inf, 1, False)],
)
def test_an_update_is_bad_whether_or_not_a_token_was_left(loss, norm, overflow, bad):
    for tokens in (0.0, 5.0):
        row = {"loss": loss, "grad_norm": norm, "update/overflow": overflow, "tokens/update": tokens,
               "update/applied": 0.0}
        assert is_bad(row) == bad


def no_memory(*_):
    raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 16000000000 bytes.")


@pytest.mark.parametrize("find, where", [
    (lambda *_: "weights are not finite", "weights are not finite"),
    (no_memory, "there was no memory left to find out where")], ids=["found", "out of memory"])
def test_updates_that_are_not_finite_end_the_run_though_nothing_was_left_to_learn_from(monkeypatch, find,
                                                                                       where):
    """A model that has become NaN is never right, so all advantages are 0: no token is left, and nobody would
    ever see it. One such update ends no run, even where there is no memory to look for its cause."""
    monkeypatch.setattr(update, "find_nonfinite", find)
    notes, batch = [], random_batch(np.random.default_rng(0), 6, True)[0]

    def train_step(state, policy, *_):
        row = {"loss": math.nan, "grad_norm": math.nan, "tokens/update": 0, "update/applied": 0,
               "update/overflow": 0,
               "update/bad_in_a_row": state.step + 1, "correction/rejected_fraction": 0.0}
        return state._replace(step=state.step + 1), policy, row

    cfg = load_config("demo", ["--optim.max_bad_steps", "2"])
    parts = SimpleNamespace(cfg=cfg, calibration=None, train_step=train_step, spikes=SpikeCounter(),
                            model=None, precision=None)
    run = SimpleNamespace(note=notes.append, save_bad_batch=lambda *_: "bad_batch.safetensors")
    state = TrainState(0, {}, (), 0, 1.0, 0)
    with pytest.raises(NonFiniteStep,
                       match=f"2 updates in a row were not finite; none was applied: {where}"):
        update.run_updates(parts, run, state, {}, 1, None, [batch] * 3, [(np.zeros(1), None)] * 3)
    assert len(notes) == 2 and "no token was left" not in "".join(notes)
