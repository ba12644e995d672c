"""The batches of an asynchronous run: what they hold, what is recorded, and that a run which ends at any
point goes on to the same weights."""

import functools
import json
import os
import tempfile
import time
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_world import IN_FLIGHT, World

from bridges.api import EngineUnhealthy
from bridges.engines.fake_engine import FakeEngine
from jaxfp8rl.errors import CheckpointError, ConfigError
from jaxfp8rl.rollout.journal import Journal
from jaxfp8rl.rollout.pipeline import RolloutPipeline
from jaxfp8rl.rollout.samplers import Interrupted

KINDS = {
    "synchronous": [],
    "whole groups beside the learner": ["--rollout.max_staleness", "2"],
    "whole groups in turns": ["--rollout.max_staleness", "1", "--rollout.engine", "vllm"],
    "in flight": ["--rollout.max_staleness", "1", *IN_FLIGHT],
    "over-sampled": ["--rollout.max_staleness", "1", "--rollout.oversample", "1.5", *IN_FLIGHT],
    "over-sampled, nothing ahead": ["--rollout.oversample", "2", *IN_FLIGHT],
    "by what was solved": ["--rollout.max_staleness", "1", "--curriculum.by", "problem", *IN_FLIGHT],
    "dynamic": ["--rollout.max_staleness", "2", "--loss.dynamic_sampling_rounds", "3", *IN_FLIGHT],
}
POINTS = {  # where a process ends, in its n-th step
    "sampling": (FakeEngine, "_advance"), "the record": (Journal, "write"),
    "learning": (World, "publish"), "a save": (World, "save"), "a publish": (FakeEngine, "commit"),
}


class Killed(BaseException):
    """Nothing of ours catches it."""


@functools.cache
def straight(kind: str) -> World:
    folder = tempfile.mkdtemp()
    return World(Path(folder), KINDS[kind]).run()


def end_at(patch, point: str, times: int) -> None:
    owner, name = POINTS[point]
    function, calls = getattr(owner, name), iter(range(1, 10**6))

    def ending(*args, **kwargs):
        if next(calls) == times:
            raise Killed
        return function(*args, **kwargs)

    patch.setattr(owner, name, ending)


def ended(folder: Path, words: list[str], point: str, times: int, checkpoint=None, luck=None) -> tuple:
    """(the checkpoint that a process leaves which ends at a point, all the weights that it had)."""
    with pytest.MonkeyPatch.context() as patch:
        worlds = []
        init = World.__init__
        patch.setattr(World, "__init__", lambda self, *a, **k: (worlds.append(self), init(self, *a, **k))[1])
        end_at(patch, point, times)
        try:
            World(folder, words, checkpoint, luck).run()
        except Killed:
            pass
    return (worlds[0].saved if worlds[0].saved[1] else None), worlds[0].history


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=6, deadline=None)
@given(points=st.lists(st.tuples(st.sampled_from(sorted(POINTS)), st.integers(1, 60)), min_size=1,
                       max_size=3))
def test_a_run_that_ends_at_any_points_goes_on_to_the_same_weights(kind, points):
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        for point, times in points:
            times = times if point == "sampling" else 1 + times % 9
            checkpoint = ended(Path(folder), KINDS[kind], point, times, checkpoint)[0] or checkpoint
        world = World(Path(folder), KINDS[kind], checkpoint).run()
        assert world.masters == straight(kind).masters and world.saved == straight(kind).saved
        assert world.lines() == straight(kind).lines()


@pytest.mark.parametrize("kind", ["in flight", "over-sampled"])
@settings(max_examples=4, deadline=None)
@given(times=st.integers(2, 8), luck=st.tuples(st.integers(0, 99), st.integers(100, 199)))
def test_what_was_recorded_is_replayed_whatever_the_engine_would_do_now(kind, times, luck):
    """An engine that finishes groups in an order of its own, as one with other users does: each step that was
    recorded gives the weights that it gave."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, before = ended(Path(folder), KINDS[kind], "learning", times, luck=luck[0])
        world = World(Path(folder), KINDS[kind], checkpoint, luck=luck[1]).run()
        again = {step: weights for step, weights in world.history.items() if step in before}
        assert again == {step: before[step] for step in again}
        assert [line["step"] for line in world.lines()] == list(range(1, 9))
        replayed = times - 1 - checkpoint[2]
        assert len(again) >= replayed and bool(world.notes) == (replayed > 0)


def test_whole_groups_are_as_old_as_the_queue_is_long():
    for kind, k in (("synchronous", 0), ("whole groups in turns", 1), ("whole groups beside the learner", 2)):
        rows = straight(kind).rows
        assert [r["staleness/versions_max"] for r in rows] == [min(i, k) for i in range(8)]
        assert [r["staleness/versions_mean"] for r in rows] == [r["staleness/versions_max"] for r in rows]
        assert all(r["rollout/groups_rejected"] == 0 for r in rows)
        assert ("queue/length" in rows[0]) == (k > 0) and "time/rollout_s" in rows[3]


def test_in_flight_completions_go_on_and_the_oldest_are_dropped():
    for kind, k in (("in flight", 1), ("over-sampled", 1), ("over-sampled, nothing ahead", 0)):
        rows = straight(kind).rows
        assert max(r["staleness/versions_max"] for r in rows) == k
        assert (sum(r["queue/partial"] for r in rows) > 0) == (k > 0)
        assert (sum(r["queue/dropped"] for r in rows) > 0) == (kind != "in flight")
        if k:
            assert any(0 < r["staleness/versions_mean"] < 1 for r in rows)


def test_a_run_has_its_admissions_and_versions_in_its_log():
    world = straight("over-sampled")
    lines = world.lines()
    assert [line["step"] for line in lines] == list(range(1, 9))
    taken = [name for line in lines for name in line["taken"]]
    assert len(set(taken)) == len(taken) == 16
    assert all(line["step"] - 2 <= low <= high < line["step"]
               for line in lines for low, high in line["taken"].values())
    records = sorted(int(p.stem) for p in (Path(world.cfg.run.dir) / "rollouts").glob("*.json"))
    assert records == list(range(9 - 2 * (world.cfg.run.keep_checkpoints + 1), 9)), "those that may be needed"
    assert not (Path(straight("synchronous").cfg.run.dir) / "rollouts.jsonl").exists()


def test_records_of_other_settings_are_not_replayed(tmp_path):
    words = KINDS["in flight"]
    checkpoint, _ = ended(tmp_path, words, "learning", 5)
    world = World(tmp_path, [*words, "--optim.lr", "0.5"], checkpoint)
    assert "sampled anew: they were recorded under other settings" in world.notes[0]
    world.run()
    assert [line["step"] for line in world.lines()] == list(range(1, 9))


def test_a_record_cut_short_ends_the_replay(tmp_path):
    checkpoint, _ = ended(tmp_path, KINDS["in flight"], "learning", 5)
    last = tmp_path / "rollouts" / "4.json"
    last.write_text(last.read_text()[:100])
    world = World(tmp_path, KINDS["in flight"], checkpoint)
    assert "steps 3 to 3 are replayed" in world.notes[0]
    assert world.run().masters == straight("in flight").masters


def test_a_smaller_bound_drops_what_is_too_old_for_it_and_draws_its_problems_again(tmp_path):
    world = World(tmp_path, KINDS["whole groups beside the learner"])
    for _ in range(4):
        world.one_step()
    world.save()
    queued = [t["problem"] for t in json.loads(world.saved[1])["queue"]]
    later = World(tmp_path, [], world.saved)
    batch = later.one_step()
    assert [int(g.prompt.problem.id[1:]) for g in batch.chosen] == queued[:2]
    assert batch.age(4)["staleness/versions_max"] == 0 and later.engine.weight_version() == 5


def test_a_fork_draws_the_problems_again_that_the_other_run_had_sampled_ahead(tmp_path):
    world = World(tmp_path / "a", KINDS["in flight"])
    world.one_step()
    state = world.batches.state()
    other = World(tmp_path / "b", KINDS["in flight"])
    other.batches.draw_again(state)
    other.one_step()
    drawn = [t["problem"] for t in state["queue"]]
    taken = json.loads((tmp_path / "b" / "rollouts" / "1.json").read_text())
    assert [t["problem"] for t in (*sum(taken["taken"], []),
                                   *taken["queue"])][:2] == drawn and len(drawn) == 2


def test_an_engine_that_samples_beside_fails_in_the_learners_thread(tmp_path):
    world = World(tmp_path, KINDS["whole groups beside the learner"])
    world.engine.faults.logprobs = "nan"
    with pytest.raises(EngineUnhealthy, match="every group of the step was rejected.*log-probability nan"):
        world.one_step()


def test_an_engine_that_missed_a_publish_is_found_in_flight_too(tmp_path):
    world = World(tmp_path, KINDS["in flight"])
    world.step, world.engine.faults.stale_version = 3, True
    world.publish()
    with pytest.raises(EngineUnhealthy, match=r"sampled at weight versions .*version=2.*expected 3"):
        world.one_step()


def test_an_engine_that_cannot_be_interrupted_is_refused(tmp_path):
    world = World(tmp_path, KINDS["in flight"])
    world.ctx.engine = type("Whole", (), {"capabilities": world.engine.capabilities})()
    with pytest.raises(ConfigError,
                       match="fake, the engine of rollout.engine = \"vllm\", cannot be interrupted"):
        RolloutPipeline(world.ctx)


def test_a_lost_group_is_an_error_and_not_a_wait_without_end(tmp_path):
    world = World(tmp_path, KINDS["in flight"])
    world.batches._sampler._engine = type("Forgetful", (FakeEngine,),
                                          {"submit": lambda *_: None, "poll": list})()
    start = time.monotonic()
    world.batches._sampler._flying.clear()
    with pytest.raises(EngineUnhealthy, match="too few"):
        world.batches._sampler.wait(lambda: False, lambda phase: open(os.devnull))
    assert time.monotonic() - start < 5


def test_a_full_disk_stops_the_run_and_says_how_to_go_on(tmp_path, monkeypatch):
    world = World(tmp_path, KINDS["in flight"])

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match="the rollouts of step 1 could not be written: No space left"):
        world.one_step()


def test_rewards_and_versions_are_those_of_numpy():
    assert np.isfinite([r["reward/mean"] for kind in KINDS for r in straight(kind).rows]).all()


@pytest.mark.parametrize("itself, calls", [(False, ["pause", "resume"]), (True, [])])
def test_an_engine_whose_publish_pauses_is_not_paused_before(itself, calls):
    """What a publish does before it pauses does not stop decoding."""
    seen = []
    engine = types.SimpleNamespace(submit=lambda *a: None, pause=lambda **k: seen.append("pause"),
                                   resume=lambda: seen.append("resume"), publish_pauses=itself)
    sampler = Interrupted(engine, recompute_kv=True)
    sampler.submit([types.SimpleNamespace(request=types.SimpleNamespace(request_id="a"), completions=())], 1)
    sampler.hold(None), sampler.release()
    assert seen == calls
