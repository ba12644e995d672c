"""Row 27 on a GPU: a run that is killed leaves nothing of the device's memory taken, neither its own nor its
engine's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.presets import in_use

MICRO_RUN = Path(__file__).parent.parent / "faults" / "micro_run.py"
OPTIONS = [
    "--rollout.gpu_memory_utilization", "0.1", "--rollout.kv_cache_gib", "4", "--rollout.kv_cache", "auto",
    "--precision.compute_dtype", "bfloat16", "--run.steps", "3", "--run.eval_problems", "4", "--sft.steps",
    "0",
]


@pytest.mark.parametrize("engine", ["served", "vllm"])
def test_killed_between_two_publishes_it_leaves_no_memory_taken(engine, tmp_path):
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    before, most, ended = in_use(gpu), 0, threading.Event()

    def watch():
        nonlocal most
        while not ended.wait(0.5):
            most = max(most, in_use(gpu))

    watcher = threading.Thread(target=watch)
    watcher.start()
    place = ("jaxfp8rl.training.loop:run_updates", "2")
    command = [sys.executable, str(MICRO_RUN), *place, "train", "demo", "--rollout.engine", engine, *OPTIONS]
    try:
        done = subprocess.run([*command, "--run.dir", str(tmp_path / "run")], capture_output=True, text=True,
                              timeout=400)
    finally:
        ended.set()
        watcher.join()
    assert done.returncode == -signal.SIGKILL, done.stdout[-4000:] + done.stderr[-4000:]
    until = time.monotonic() + 15
    while (left := in_use(gpu)) > before + 16 and time.monotonic() < until:
        time.sleep(0.2)
    waited = time.monotonic() - until + 15
    print(f"{engine}: {before} MiB before, {most} at the most, {left} {waited:.1f} s after the kill")
    assert most > before + 4096, "the run never took its cache"
    assert left <= before + 16
