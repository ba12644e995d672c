"""Two processes of two virtual CPU devices each are one of four: the same metrics, samples and state, to the bit."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "faults"))

from micro_run import arrays, assert_same_run, metrics, words

PROGRAM, DEVICES = Path(__file__).parent / "one_of_several.py", 4
MESH = {"train.data": 2, "train.fsdp": 2, "train.rows_per_microbatch": 4, "run.steps": 4}


def run(folder: Path, count: int, *more: str, happens: dict[int, tuple[str, int]] | None = None, **changes):
    """(exit code, what it said) of each of `count` processes of a run; `happens`: to which what in which step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = words(folder, **{k.replace(".", "__"): v for k, v in (MESH | {"train.processes": count} | changes).items()})
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES // count}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
    }  # fmt: skip
    started = []
    for i in range(count):
        what, step = (happens or {}).get(i, ("nothing", 0))
        command = [sys.executable, PROGRAM, what, str(step), "train", "demo", *options, *more]
        started.append(subprocess.Popen(command, env=environment | {"JAX_PROCESS_ID": str(i)}, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT))  # fmt: skip
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, text) for process, text in zip(started, said)]


def done(ended: list[tuple[int, str]], code: int = 0) -> list[str]:
    assert [c for c, _ in ended] == [code] * len(ended), "\n".join(text[-3000:] for _, text in ended)
    return [text for _, text in ended]


def test_two_that_were_stopped_and_resumed_are_one_that_was_not(tmp_path):
    """SIGTERM reaches the second alone. What is written the first has written, and says."""
    done(run(tmp_path / "one", 1))
    first, second = done(run(tmp_path / "two", 2, happens={1: ("SIGTERM", 2)}), 143)
    assert "stopped; step 2 is saved" in first and "stopped; step 2" not in second and "step 1/4" not in second
    assert [m["step"] for m in metrics(tmp_path / "two")] == [0, 1, 2] and arrays(tmp_path / "two", 2)
    done(run(tmp_path / "two", 2, "--resume"))
    assert_same_run(tmp_path / "two", tmp_path / "one", step=4)


@pytest.mark.slow
def test_an_engine_that_fails_ends_both_with_its_message(tmp_path):
    first, second = done(run(tmp_path / "two", 2, happens={0: ("engine", 3)}), 5)
    assert "jaxfp8rl: the engine has died" in first
    assert "jaxfp8rl: the first process has ended: the engine has died\n  next step: start another" in second
    assert [m["step"] for m in metrics(tmp_path / "two")] == [0, 1, 2]
