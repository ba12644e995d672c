"""`jaxfp8rl launch --on ray` with Ray itself: two learners, two engines of stock `vllm serve`, one of which
is killed and returns. Ray is not among the pins of the suite: `pip install "jaxfp8rl[ray]"`."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from benchmarks.processes import child
from jaxfp8rl.monitors.jsonl import read_metrics

lacks = [name for name in ("ray", "vllm") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500),
              pytest.mark.skipif(bool(lacks), reason=f"not installed here: {', '.join(lacks)}")]
STEPS = 9999  # more than are done before the run is asked to end
SETTINGS = {
    "rollout.engine": "served", "rollout.engines": 2, "rollout.link": "shared_memory",
    "rollout.fp8_kernel": "emulated", "rollout.kv_cache": "auto", "rollout.enforce_eager": "true",
    "rollout.max_num_seqs": 16, "precision.compute_dtype": "bfloat16", "rollout.prompts_per_step": 4,
    "rollout.samples_per_prompt": 4, "run.steps": STEPS, "run.eval_every": 0, "run.eval_problems": 8,
    "run.save_every": STEPS, "train.processes": 2, "train.data": 2, "train.rows_per_microbatch": 4,
    "train.row_tokens": 40, "task.options.operands": 2, "sft.steps": 0,
}


def weight_version(url: str, token: str) -> str | None:
    """What the engine at `url` says; None while it gives no answer."""
    request = urllib.request.Request(f"{url}/weight_info", headers={"Authorization": f"Bearer {token}"})
    with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
        return json.load(answer).get("weight_version")
    return None


def processes_of(port: str) -> list[int]:
    """The leaders of the groups of `vllm serve` on a port."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"serve" in words and port.encode() in words:
                found.append(os.getpgid(int(path.parent.name)))
    return sorted(set(found))


def test_an_engine_is_killed_and_returns_and_the_run_goes_on_until_it_is_asked_to_end(tmp_path):
    run, said = tmp_path / "run", tmp_path / "said"
    words = [w for k, v in (SETTINGS | {"run.dir": run}).items() for w in (f"--{k}", str(v))]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}

    def until(condition, what: str) -> None:
        end = time.monotonic() + 1200
        while not (found := condition()):
            assert process.poll() is None, f"{what}: {said.read_text()[-3000:]}"
            assert time.monotonic() < end, what
            time.sleep(0.2)
        return found

    steps = lambda: len(read_metrics(run / "metrics.jsonl")) if (run / "metrics.jsonl").exists() else 0
    command = [sys.executable, "-m", "jaxfp8rl", "launch", "demo", "--on", "ray", *words]
    with (said.open("wb") as out,
          child(command, patience=60, env=environment, stdout=out, stderr=subprocess.STDOUT) as process):
        until(lambda: steps() > 2, "no step was done")
        url = re.search(r"^engine 1 .* (http://\S+)", said.read_text(), re.M)[1]
        token = (tmp_path / "run.launch" / "token").read_text()
        [group] = processes_of(port := url.rpartition(":")[2])
        os.killpg(group, signal.SIGKILL)
        at = steps()
        version = until(lambda: weight_version(url, token), "the engine has not returned")
        assert processes_of(port) != [group] and version.isdecimal(), "the last publish was given to it"
        until(lambda: int(weight_version(url, token) or 0) > int(version), "it is not published to any more")
        again = steps()
        until(lambda: steps() > again + 2, "the run does not go on")
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 128 + signal.SIGTERM, said.read_text()[-3000:]
    rows = read_metrics(run / "metrics.jsonl")
    assert [m["step"] for m in rows] == list(range(len(rows))) and len(rows) > again > at
    assert (run / "checkpoints" / str(rows[-1]["step"])).is_dir(), "the learners save what they have"
    assert all(m["mismatch/token_mult_prob_error"] < 1.02 for m in rows[1:])
    assert "learner 0" in said.read_text() and not processes_of(port)
    assert not (tmp_path / "run.launch" / "token").exists()
