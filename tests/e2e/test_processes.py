"""Two processes of two virtual CPU devices each are one of four: the same metrics, samples and state, to the
bit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from micro_run import arrays, assert_same_run, lasting, metrics, words
from numpy.testing import assert_equal

from benchmarks.processes import free_port

PROGRAM, DEVICES = Path(__file__).parent / "one_of_several.py", 4
MESH = {"train.data": 2, "train.fsdp": 2, "train.rows_per_microbatch": 4, "run.steps": 4}


@contextlib.contextmanager
def started(folder: Path, count: int, *more: str, happens: dict[int, tuple[str, int]] | None = None,
            **changes):
    """The `count` processes of a run; `happens`: to which what in which step."""
    options = words(folder, **{k.replace(".", "__"): v
                               for k, v in (MESH | {"train.processes": count} | changes).items()})
    # while another process compiles, on two cores
    patience = ("--xla_cpu_collective_timeout_seconds=300 "
                "--xla_cpu_collective_call_terminate_timeout_seconds=300")
    one_order = "--xla_cpu_multi_thread_eigen=false"  # of sums
    devices = f"--xla_force_host_platform_device_count={DEVICES // count}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {devices} {one_order} {patience}"
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    with contextlib.ExitStack() as stack:
        processes = []
        for i in range(count):
            what, step = (happens or {}).get(i, ("nothing", 0))
            command = [sys.executable, PROGRAM, what, str(step), "train", "demo", *options, *more]
            process = subprocess.Popen(command, env=environment | {"JAX_PROCESS_ID": str(i)}, text=True,
                                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        yield processes


def ended(processes: list[subprocess.Popen], code: int = 0) -> list[str]:
    """What each has said; all end with `code`."""
    said = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode
            for process in processes] == [code] * len(said), "\n".join(text[-3000:] for text in said)
    return said


def test_two_are_one_until_the_second_is_told_to_stop(tmp_path):
    """What is written the first has written, and says."""
    stopped = started(tmp_path / "two", 2, happens={1: ("SIGTERM", 2)})
    with started(tmp_path / "one", 1) as one, stopped as two:
        first, second = ended(two, 143)
        ended(one)
    # of these small ones it does not
    assert "on CPUs: JAX's reduce-scatter there may return wrong sums" in first
    assert "stopped; step 2 is saved" in first
    assert "stopped; step 2" not in second and "step 1/4" not in second
    straight = lasting(metrics(tmp_path / "one"))
    assert_equal(lasting(metrics(tmp_path / "two")), straight[:3])
    samples = (tmp_path / "two" / "samples.jsonl").read_text()
    assert samples and (tmp_path / "one" / "samples.jsonl").read_text().startswith(samples)
    assert_equal(arrays(tmp_path / "two", 2), arrays(tmp_path / "one", 2))


@pytest.mark.slow
def test_an_engine_that_fails_ends_both_with_its_message_and_both_go_on_or_one_alone(tmp_path):
    failing = started(tmp_path / "two", 2, happens={0: ("engine", 3)})
    with started(tmp_path / "one", 1) as one, failing as two:
        first, second = ended(two, 5)
        ended(one)
    assert "jaxfp8rl: the engine has died" in first
    assert "jaxfp8rl: the first process has ended: the engine has died\n  next step: start another" in second
    assert [m["step"] for m in metrics(tmp_path / "two")] == [0, 1, 2]
    with started(tmp_path / "two", 2, "--resume") as two:
        ended(two)
    assert_same_run(tmp_path / "two", tmp_path / "one", step=4)
    with started(tmp_path / "two", 1, "--resume", **{"run.steps": 5}) as one:
        ended(one)
    assert [m["step"] for m in metrics(tmp_path / "two")] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_what_else_a_run_may_do(tmp_path):
    """Both begin with a warm start and hold on to its policy, in FP8, and say what else was likely; then each
    is forked from.

    Along "tensor": gloo's reduce-scatter, which "fsdp" takes, is wrong for weights of this size now and then
    (jax-ml/jax#40830).
    """
    both = {
        "train.fsdp": 1, "train.tensor": 2,
        "sft.steps": 2, "loss.kl_coef": 0.1, "run.samples_top_k": 2, "run.steps": 2, "run.save_every": 1,
        "precision.recipe": "fp8_unified",
        "model.config.hidden_size": 256, "model.config.intermediate_size": 256,
        "model.config.num_attention_heads": 4,
        "model.config.num_key_value_heads": 4, "model.config.head_dim": 64, "precision.exclude": "",
    }
    for name, count in {"one": 1, "two": 2}.items():
        with started(tmp_path / name, count, **both) as processes:
            ended(processes)
        with started(tmp_path / f"{name}-forked", count, "--fork", f"{tmp_path / name}@1",
                     **both | {"optim.lr": 1e-3}) as processes:
            ended(processes)
    assert_same_run(tmp_path / "two", tmp_path / "one", step=2)
    assert_same_run(tmp_path / "two-forked", tmp_path / "one-forked", step=2)
