"""An asynchronous run that ends at any point goes on to the same masters, metrics and samples: whole groups
by the embedded engine, groups in flight across publishes by the numpy engine."""

import functools
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import async_run
import micro_run
import pytest
from random_kills import cost, planned

from bridges.engines import embedded_engine
from jaxfp8rl.rollout.journal import Journal
from jaxfp8rl.training import loop, publishing

pytestmark = pytest.mark.usefixtures("children")


class Killed(BaseException):
    """Nothing of ours catches it."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory, children):
    """engine -> the directory of a run that nothing interrupts."""
    @functools.cache
    def run(engine: str) -> Path:
        directory = tmp_path_factory.mktemp(engine) / "run"
        with pytest.MonkeyPatch.context() as patch:
            async_run.install(patch.setattr, engine)
            loop.train(async_run.config(engine, directory))
        return directory

    return run


@pytest.fixture
def engine(request, monkeypatch) -> str:
    async_run.install(monkeypatch.setattr, request.param)
    return request.param


def end_at(monkeypatch, owner, name: str, times: int) -> None:
    function, calls = getattr(owner, name), iter(range(1, 99))

    def ending(*args, **kwargs):
        if next(calls) == times:
            raise Killed
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, ending)


@pytest.mark.slow  # tests/unit/rollout/test_pipeline.py ends runs without a model anywhere, within seconds
@pytest.mark.parametrize("engine, owner, name, times", [
    ("fake", publishing, "publish", 6),  # step 5 is recorded and learned from, its weights are not published
    ("jax", Journal, "write", 4),  # step 4 has its batch and no record
], indirect=["engine"], ids=["in flight", "whole groups"])
def test_a_run_that_ends_anywhere_goes_on_to_the_same_masters(engine, owner, name, times, straight, tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        end_at(patch, owner, name, times)
        with pytest.raises(Killed):
            loop.train(async_run.config(engine, tmp_path))
    loop.train(async_run.config(engine, tmp_path), resume=True)
    micro_run.assert_same_run(tmp_path, straight(engine))
    lines = lambda run: [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert lines(tmp_path) == lines(straight(engine)) and [x["step"] for x in lines(tmp_path)] == [1, 2, 3, 4,
                                                                                                   5, 6]
    if engine == "fake":
        rows = micro_run.metrics(tmp_path)[1:]
        assert sum(r["queue/partial"] for r in rows) > 0 < sum(r["queue/dropped"] for r in rows)
        assert max(r["staleness/versions_max"] for r in rows) == 1
        assert "are replayed as they were recorded" in (tmp_path / "notes.txt").read_text()


def killed(engine: str, place: str, times: int, directory: Path, seconds: float, **changes) -> None:
    """A run that SIGKILLs itself there."""
    command = [sys.executable, str(Path(async_run.__file__)), engine, place, str(times), "train", "demo",
               *async_run.words(engine, directory, **changes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == -signal.SIGKILL, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.slow  # tests/unit/rollout/test_embedded_rollout.py interrupts it, too
def test_publishes_interrupt_the_embedded_engine(tmp_path, monkeypatch):
    async_run.install(monkeypatch.setattr, "jax in flight")
    monkeypatch.setattr(embedded_engine, "MOMENT", 1)
    loop.train(async_run.config("jax in flight", tmp_path, run__steps=4))
    rows = micro_run.metrics(tmp_path)[1:]
    assert sum(r["queue/partial"] for r in rows) > 0 and max(r["staleness/versions_max"] for r in rows) == 1


PLACES = {
    "fake": "bridges.engines.fake_engine:FakeEngine._advance",
    "jax": "bridges.engines.embedded_engine:EmbeddedEngine.generate",
}
EVERYWHERE = ["jaxfp8rl.rollout.journal:Journal._write",
              "jaxfp8rl.rollout.pipeline:RolloutPipeline._rollouts",
              "jaxfp8rl.training.publishing:publish", "jaxfp8rl.run.run_directory:RunDirectory.log"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", PLACES, indirect=True)
@pytest.mark.parametrize("point", range(10))
def test_sigkill_at_twenty_points(engine, point, straight, tmp_path):
    """Each place twice, in an early and in a late step."""
    places = [PLACES[engine], *EVERYWHERE]
    place, late = places[point // 2], point % 2
    times = {"FakeEngine._advance": (30, 130), "EmbeddedEngine.generate": (4, 8)}.get(place.partition(":")[2],
                                                                                 (3, 5))[late]
    killed(engine, place, times, tmp_path, 200)
    loop.train(async_run.config(engine, tmp_path), resume=True)
    micro_run.assert_same_run(tmp_path, straight(engine))


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("recompute", ["true", "false"])
def test_a_run_in_flight_in_two_served_engines_is_replayed_to_the_same_masters(recompute, tmp_path,
                                                                               monkeypatch):
    """It is killed behind the record of step 5, and goes on from its checkpoint of step 4: twice, from two
    copies."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    async_run.install(monkeypatch.setattr, "served")
    runs, said = [tmp_path / "a", tmp_path / "b"], {"rollout__recompute_kv": recompute}
    killed("served", "jaxfp8rl.training.publishing:publish", 6, runs[0], 600, **said)  # step 5 has learned
    before = micro_run.metrics(runs[0])
    shutil.copytree(*runs)
    for run in runs:
        loop.train(async_run.config("served", run, run__steps=5, **said), resume=True)
        assert "are replayed as they were recorded" in (run / "notes.txt").read_text()
    rows = micro_run.lasting(micro_run.metrics(runs[0]))
    assert [r["step"] for r in rows][-1] == 5 and rows[: len(before)] == micro_run.lasting(before)
    assert sum(r["queue/partial"] for r in rows[1:]) > 0, "publishes have interrupted completions"
    assert max(r["staleness/versions_max"] for r in rows[1:]) == 1
    micro_run.assert_same_run(*runs, step=5)


# tests/faults/test_run_faults.py has two points; the log of this: benchmarks/results/kills.json
@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("kind, count, steps", [
    ("in flight", 18, 20),
    pytest.param("vllm", 2, 6, marks=pytest.mark.skipif(importlib.util.find_spec("vllm") is None,
                                                        reason="vLLM is not installed"))])
def test_killed_at_random_moments_a_run_in_served_engines_loses_nothing(kind, count,
                                                                        steps, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    found = cost(tmp_path, kind, steps, planned(kind, count, steps, seed=1))
    print("\n".join(map(str, found["log"])))
    assert len(found["kills"]) == count and found["processes killed"] == count // 2
    for what in ("arrays", "metrics", "told before", "samples"):
        assert found[what] and all(found[what]), what
    assert found["groups"]["lost"] == found["groups"]["short"] == found["engines left"] == 0
    assert found["groups"]["in flight across a publish"] > 0
