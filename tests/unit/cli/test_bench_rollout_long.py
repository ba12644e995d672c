"""The arithmetic of `bench rollout_long`, on an engine whose steps take what is asked for."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from benchmarks import rollout
from benchmarks.rollout_long import SHORT, WINDOW, mean_step, others, rows_of, step_ms


@pytest.fixture
def engine(monkeypatch):
    """Its clock: a second for what is not in the prefix cache yet, half a second for a start, and 2 ms and a
    microsecond a token of context for a step."""
    clock, cached = [0.0], set()
    monkeypatch.setattr(rollout, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    def generate(requests):
        length, tokens = len(requests[0].prompt_token_ids), requests[0].sampling.max_tokens
        clock[0] += 0.5 + (length not in cached) + sum(2e-3 + 1e-6 * (length + i) for i in range(tokens))
        cached.add(length)
        return [[SimpleNamespace(token_ids=[0] * tokens)] for _ in requests]

    return SimpleNamespace(generate=generate)


def test_a_window_counts_neither_its_prompt_nor_the_start(engine):
    middle = 1000 + SHORT + (WINDOW - 1) / 2
    assert step_ms(engine, 3, 1000) == pytest.approx(2 + 1e-3 * middle, rel=1e-6)


def test_a_completion_that_ends_early_stops_it(engine):
    early = SimpleNamespace(generate=lambda requests: [[SimpleNamespace(token_ids=[0])] for _ in requests])
    with pytest.raises(SystemExit, match="ended early"):
        step_ms(early, 3, 1000)
    assert engine


def test_between_depths_a_step_is_interpolated_and_beyond_them_it_stays():
    line = {100: 1.1, 500: 1.5, 900: 1.9}
    assert mean_step(line, 1000) == pytest.approx(1.5, abs=1e-3)
    assert mean_step(json.loads(json.dumps(line)), 200) == pytest.approx(mean_step({100: 1.1, 500: 1.5}, 200))
    assert mean_step({7: 3.0}, 50) == 3.0


def test_rows_give_each_length_with_its_ratio_and_what_decodes_at_once():
    found = {"fp8": {"at once": 30, "step, ms": {"0": 5.0, "20": 15.0}},
             "bf16": {"at once": 12, "step, ms": {"0": 6.0, "20": 6.0}}}
    at_once, short, long = rows_of("X in 56 GB", [10, 21], found)
    assert (at_once["ours"], at_once["yardstick"], at_once["ratio"]) == (30, 12, 2.5)
    assert short["case"] == "X in 56 GB, completions of 10 tokens"
    assert short["yardstick"] == pytest.approx(2000) == long["yardstick"]
    assert long["ours"] == pytest.approx(30e3 / 10) and long["ratio"] == pytest.approx(1.5)
    assert short["ours"] > long["ours"]


def test_other_cases_stay_in_the_file(tmp_path):
    out = tmp_path / "x.json"
    assert others(out, "A in 1 GB") == ([], {})
    rows = [{"case": f"{name} in 1 GB, completions of 5 tokens"} for name in "AB"]
    out.write_text(json.dumps({"rows": rows, "each": {"A in 1 GB": 1, "B in 1 GB": 2}}))
    assert others(out, "A in 1 GB") == (rows[1:], {"B in 1 GB": 2})
