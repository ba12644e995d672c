"""Records reach every sink whole, survive a crash and a resume, and are summed up truthfully."""

from __future__ import annotations

import io
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import UserError
from jaxfp8rl.monitors import console as console_module
from jaxfp8rl.monitors.base import Monitors
from jaxfp8rl.monitors.console import ConsoleMonitor
from jaxfp8rl.monitors.end.plot import smooth, write_plot
from jaxfp8rl.monitors.end.summary import phase_table, write_summary
from jaxfp8rl.monitors.jsonl import JsonlMonitor, read_metrics
from jaxfp8rl.monitors.series import series
from jaxfp8rl.monitors.tensorboard import TensorboardMonitor
from jaxfp8rl.run.run_directory import RunDirectory


def no_constants(name):
    raise AssertionError(f"{name} is not JSON")


@given(st.dictionaries(st.text(), st.floats() | st.integers(-(2**53), 2**53)))
def test_jsonl_round_trip_stays_valid_json(tmp_path_factory, record):
    path = tmp_path_factory.mktemp("m") / "metrics.jsonl"
    monitor = JsonlMonitor(path)
    monitor.log({**record, "step": 1})
    for line in path.read_bytes().splitlines():  # flushed: readable before close
        json.loads(line, parse_constant=no_constants)
    (back,) = read_metrics(path)
    assert back.keys() == {**record, "step": 1}.keys()
    assert all(back[k] == v or (math.isnan(v) and math.isnan(back[k])) for k, v in record.items()
               if k != "step")
    monitor.close()


def test_jsonl_takes_array_scalars_and_nested_samples(tmp_path):
    monitor = JsonlMonitor(tmp_path / "new" / "samples.jsonl")
    monitor.log({"step": np.int64(1), "x": jnp.float32(0.5), "y": jnp.bfloat16(jnp.nan),
                 "logp": np.array([0.5, -np.inf])})
    monitor.log({"step": 2, "text": "two\nlines \u2028 nan"})
    first, second = (tmp_path / "new" / "samples.jsonl").read_text().split("\n")[:2]
    assert json.loads(first) == {"step": 1, "x": 0.5, "y": "nan", "logp": [0.5, "-inf"]}
    assert json.loads(second)["text"] == "two\nlines \u2028 nan"
    monitor.close()


def test_half_a_surrogate_pair_is_written_as_json_writes_it(tmp_path):
    monitor = JsonlMonitor(tmp_path / "samples.jsonl")
    monitor.log({"step": 1, "text": "a\ud83d"})
    monitor.truncate_after(1)
    monitor.close()
    assert json.loads((tmp_path / "samples.jsonl").read_text(encoding="utf-8"))["text"] == "a\ud83d"


def test_truncate_after_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    monitor = JsonlMonitor(path)
    for step in range(5):
        monitor.log({"step": step, "text": "a\u2028b"})
    monitor.close()
    path.write_text(path.read_text() + '{"step": 5, "lo')
    monitor = JsonlMonitor(path)
    monitor.truncate_after(2)
    monitor.log({"step": 3, "again": 1})
    assert [r["step"] for r in read_metrics(path)] == [0, 1, 2, 3] and read_metrics(path)[-1]["again"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    monitor.close()


def test_tensorboard_holds_the_numbers(tmp_path):
    from tensorboardX.proto.event_pb2 import Event

    monitor = TensorboardMonitor(tmp_path)
    monitor.log({"step": 7, "reward/mean": 0.25, "note": "text"})
    monitor.close()
    (file,) = tmp_path.iterdir()
    data, scalars = file.read_bytes(), {}
    while data:  # a TFRecord: length u64, crc u32, payload, crc u32
        n = int.from_bytes(data[:8], "little")
        event = Event.FromString(data[12 : 12 + n])
        scalars |= {v.tag: (event.step, v.simple_value) for v in event.summary.value}
        data = data[16 + n :]
    assert scalars == {"reward/mean": (7, 0.25)}


def logged(terminal: bool, records) -> str:
    out = io.StringIO()
    monitor = ConsoleMonitor(4, Console(file=out, force_terminal=terminal, width=80 if terminal else 40,
                                        highlight=False))
    monitor.note("gate passed")
    for record in records:
        monitor.log(record)
    monitor.close()
    return out.getvalue()


RECORDS = [
    {"step": 0, "eval/reward_mean": 0.5},
    {"step": 1, "reward/mean": 0.25, "mismatch/token_mult_prob_error": 1.01, "tokens/rollout_per_s": 1234.0},
    {"step": 2, "reward/mean": float("nan"), "eval/reward_mean": 0.75,
     "mismatch/token_mult_prob_error": 1.02},
]


def test_console_writes_a_plain_line_a_step(monkeypatch):
    ticks = iter([60.0, 70.0])  # step 1 compiled for a minute
    monkeypatch.setattr(console_module.time, "monotonic", lambda: next(ticks))
    assert logged(False, RECORDS).splitlines() == [
        "gate passed",
        "step 0/4  held-out 0.500",
        "step 1/4  reward 0.250  mismatch 1.0100  tok/s 1,234",
        "step 2/4  held-out 0.750  reward nan  mismatch 1.0200  left 0:00:20",
    ]


MOVES = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")  # colours and what moves the cursor


def test_console_draws_on_a_terminal_and_keeps_every_step():
    out = MOVES.sub("", logged(True, RECORDS))
    for said in ("step 0/4  held-out 0.500", "step 1/4  reward 0.250",
                 "step 2/4  held-out 0.750  reward nan  mismatch 1.0200"):
        assert said in out
    assert "\u2585" in out  # the course of the reward


def test_a_mismatch_is_coloured_by_the_table_of_health():
    of = lambda value: logged(True, [{"step": 1, "mismatch/token_mult_prob_error": value}])
    assert "\x1b[32mmismatch 1.0100" in of(1.01) and "\x1b[33mmismatch 1.0700" in of(
        1.07) and "\x1b[1;31mmismatch 1.5" in of(1.5)
    assert "\x1b" not in logged(False, [{"step": 1, "mismatch/token_mult_prob_error": 1.5}])


@given(st.floats(0, 1), st.floats(1, 1e6), st.floats(0, 1e9))
def test_a_line_fits_80_columns(reward, mismatch, speed):
    record = {"step": 123456, "eval/reward_mean": reward, "reward/mean": -reward,
              "mismatch/token_mult_prob_error": mismatch}
    lines = logged(False, [{"step": 1}, record | {"tokens/rollout_per_s": speed}]).splitlines()
    assert all(len(line) <= 80
               for line in lines) and f"held-out {reward:.3f}  reward {-reward:.3f}" in lines[-1]


def test_the_course_of_the_reward_is_kept_in_a_log():
    records = [{"step": s, "reward/mean": s / 4} for s in (1, 2, 3)] + [{"step": 4, "eval/reward_mean": 1.0}]
    lines = logged(False, records).splitlines()
    assert lines[-1] == "rewards so far  0.250 \u2581\u2585\u2588 0.750"


def test_what_takes_long_is_named_and_told_once(monkeypatch):
    """A line each, when it ends; what of it was compiling; in a log as on a terminal."""
    clock = iter([0.0, 0.0, 21.5, 30.0, 31.0, 40.0, 41.0, 41.0])
    monkeypatch.setattr(console_module.time, "perf_counter", lambda: next(clock))
    out = io.StringIO()
    monitor = ConsoleMonitor(4, Console(file=out, width=80))
    for name in ("starting the engine (vllm)", "starting the engine (vllm)", "gate"):
        monitor.phase(name)
    monitor.doing.compiled(console_module.BEGINS, 0.5)
    assert monitor.doing._compiling
    monitor.doing.compiled(console_module.ENDS, 7.0)
    assert not monitor.doing._compiling
    for name in ("update", "gate", "update"):  # the second gate and the second update are no news
        monitor.phase(name)
    monitor.close()
    assert out.getvalue().splitlines() == [
        "starting the engine (vllm): 21.5 s", "gate: 8.5 s, 7.5 s of it compiling", "update: 1.0 s",
    ]


def test_compiling_is_heard_of():
    monitor = ConsoleMonitor(1, Console(file=io.StringIO()))
    monitor.phase("update")
    jax.jit(lambda x: x * 3 + 1)(jnp.arange(7.0)).block_until_ready()
    assert monitor.doing._seconds > 0
    monitor.close()


def test_a_warm_start_has_a_bar_of_its_own():
    out = io.StringIO()
    monitor = ConsoleMonitor(4, Console(file=out, force_terminal=True, width=80))
    monitor.phase("warm start")
    for done in range(3):
        monitor.bar("warm start", done, 700)
    monitor.close()
    assert re.search(r"warm start +\d/700", MOVES.sub("", out.getvalue()))


def test_a_log_has_a_line_a_minute_of_what_takes_long(monkeypatch):
    """And none of what is over sooner, nor of its end, which the phase's line tells."""
    now = iter([0.0, 10.0, 10.0, 50.0, 50.0, 70.0, 70.0, 100.0, 100.0, 140.0, 140.0])
    monkeypatch.setattr(console_module.time, "monotonic", lambda: next(now))
    out = io.StringIO()
    monitor = ConsoleMonitor(9000, Console(file=out, width=80), of="problem")
    for done in (0, 1000, 3000, 4000, 5500, 9000):
        monitor.bar("evaluate", done, 9000)
    assert out.getvalue().splitlines() == ["evaluate: 4,000 of 9,000  left 0:01:40"]


def test_monitors_fan_out(tmp_path):
    both = Monitors([JsonlMonitor(tmp_path / "a"), JsonlMonitor(tmp_path / "b")])
    both.log({"step": 1})
    both.close()
    assert read_metrics(tmp_path / "a") == read_metrics(tmp_path / "b") == [{"step": 1}]


def test_summary_names_what_was_logged(tmp_path):
    monitor = JsonlMonitor(tmp_path / "metrics.jsonl")
    monitor.log({"step": 0, "eval/reward_mean": 0.5})
    for step in range(1, 5):
        times = {"time/rollout_s": 3.0, "time/update_s": 1.0, "time/step_s": 5.0}
        monitor.log({"step": step, "reward/mean": step / 8, "mismatch/token_mult_prob_error": 1 + step / 100,
                     **times})
    monitor.log({"step": 5, "reward/mean": float("nan"), "eval/reward_mean": 0.875})
    out = io.StringIO()
    plot = write_summary(tmp_path, Console(file=out, width=100))
    rows = {cells[1].strip(): [c.strip() for c in cells[2:-1]] for line in out.getvalue().splitlines()
            if len(cells := line.replace("┃", "│").split("│")) > 3}
    assert rows["held-out reward"] == ["0.500", "0.875", "0.688", "0.500", "0.875"]
    assert rows["mismatch, 1: none"] == ["1.0100", "1.0400", "1.0250", "1.0100", "1.0400"]
    assert rows["rollout"] == ["12.0", "60%"] and rows["other"] == ["4.0", "20%"]
    assert "rollout tokens/s" not in rows  # never logged
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and plot.stat().st_size > 20_000


def test_what_is_sampled_beside_the_update_takes_no_share_of_a_step(tmp_path):
    """With rollout.max_staleness rollout and reward run beside the update; the step has but what it waited
    for them."""
    beside = {"time/rollout_s": 8.0, "time/reward_s": 1.0, "time/wait_s": 3.0}
    steps = [{"step": i, "time/step_s": 10.0, "time/update_s": 6.0, "time/publish_s": 1.0} | beside
             for i in (1, 2)]
    table = phase_table(steps)
    assert list(zip(*(c.cells for c in table.columns))) == [
        ("wait", "6.0", "30%"), ("score", "0.0", "0%"), ("update", "12.0", "60%"), ("publish", "2.0", "10%"),
        ("other", "0.0", "0%"),
    ]
    assert write_plot(steps, tmp_path / "plot.png").stat().st_size > 1000


def test_summary_of_nothing(tmp_path):
    with pytest.raises(UserError, match="no metrics"):
        write_summary(tmp_path)


def test_series_leaves_out_what_is_not_a_number():
    records = [{"step": 1, "x": 1.0}, {"step": 2}, {"step": 3, "x": float("inf")}, {"step": 4, "x": "text"},
               {"step": 5, "x": 2}]
    assert series(records, "x") == ([1, 5], [1.0, 2.0])


@given(st.floats(-1e3, 1e3), st.integers(1, 50))
def test_smooth_leaves_a_constant_alone(value, n):
    assert smooth([value] * n) == pytest.approx([value] * n)


def test_a_step_can_be_traced(tmp_path):
    cfg = load_config("demo", ["--run.dir", str(tmp_path)])
    with RunDirectory(cfg, resume=False) as run:
        for wanted in (False, True):
            with run.profiled(wanted):
                jnp.ones(8).sum().block_until_ready()
            assert wanted == any((tmp_path / "profile").rglob("*.xplane.pb"))
