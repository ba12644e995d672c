"""How many cells run at once, on which GPUs, and with what share of a GPU's memory."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import shutil
import subprocess

import pytest
from small_protocol import small

from jaxfp8rl.errors import UserError
from jaxfp8rl.experiments import jobs
from jaxfp8rl.experiments.cells import cells
from jaxfp8rl.experiments.slots import CONTEXT, SHARE, Slot, fitting, slots
from jaxfp8rl.gpus import FRACTION, OLD_FRACTION, Gpu, gpus
from jaxfp8rl.memory.fit import needs
from jaxfp8rl.policy.shapes import model_config


def test_slots_are_as_many_as_fit_and_as_asked_for(tmp_path, monkeypatch):
    cfgs = [cell.cfg for cell in cells(small(tmp_path))]
    one, many = fitting(cfgs, 2**31), fitting(cfgs, 80 * 2**30)
    assert 1 == one < many < 80  # a context each
    found = [Gpu("0", 80 * 2**30), Gpu("1", 80 * 2**30)]
    on = lambda *args: [slot.gpu for slot in slots(cfgs, *args)]
    assert on(found, 2) == ["0", "1", "0", "1"] and on(found[:1], 200) == ["0"] * many
    assert slots(cfgs, [], 3) == [Slot()] * 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert on([]) == [""] * 4 and on(found) == ["0", "1"] * 2


def test_the_places_of_a_gpu_have_shares_that_together_fit_and_each_holds_a_plan(tmp_path, monkeypatch):
    """JAX's allocator reserves in doubling pieces: seven cells that need a tenth each would fill a GPU."""
    cfgs, total = [cell.cfg for cell in cells(small(tmp_path))], 80 * 2**30
    [share] = {slot.share for slot in slots(cfgs, [Gpu("0", total)], 7)}
    assert 7 * (share * total + CONTEXT) == pytest.approx(SHARE * total)
    most = slots(cfgs, [Gpu("0", total)], 200)
    largest = max(max(needs(cfg, model_config(cfg), total).values()) for cfg in cfgs)
    assert all(slot.share * total >= 1.09 * largest for slot in most)
    job = jobs.jobs_of(cells(small(tmp_path)), tmp_path)[1]["bf16-s0"]
    for name in (FRACTION, OLD_FRACTION, "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.delenv(name, raising=False)
    found = job.environment(Slot("GPU-b", 0.25))
    assert found[FRACTION] == "0.25" and found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-b" and FRACTION not in job.environment(Slot())
    with_vllm = dataclasses.replace(job, cfg=job.cfg.having("rollout", engine="vllm"))
    shared = with_vllm.environment(Slot("0", 0.25))
    assert FRACTION not in shared and shared["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    monkeypatch.setenv(OLD_FRACTION, "0.5")  # JAX refuses both
    assert FRACTION not in job.environment(Slot("0", 0.25))


DRIVER = """
#include <stddef.h>
#include <stdlib.h>
int cuInit(unsigned flags) { return atoi(getenv("CUDA_ERROR")); }
int cuDeviceGetCount(int *count) { *count = atoi(getenv("CUDA_COUNT")); return *count ? 0 : 100; }
int cuDeviceGet(int *device, int number) { *device = number + 10; return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)(device - 9) << 30; return 0; }
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    """A CUDA driver with so many GPUs as CUDA_COUNT says, of 1, 2, ... GiB."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so", folder / "driver.c"], check=True)
    return ctypes.CDLL(str(folder / "libcuda.so"))


@pytest.mark.parametrize("visible, count, names", [
    (None, 2, ["0", "1"]), ("3,1", 2, ["3", "1"]), (" GPU-b52, MIG-4f", 2, ["GPU-b52", "MIG-4f"]),
    ("0,9", 1, ["0"]),  # the driver stops at one that is not there
    ("", 0, []), ("-1", 0, []), (None, 0, [])])
def test_gpus_are_those_that_the_driver_gives_this_process(driver, monkeypatch, visible, count, names):
    """Without nvidia-smi, which containers may lack and which counts in another order."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setenv("CUDA_COUNT", str(count))
    monkeypatch.setenv("CUDA_ERROR", "0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpus() == []  # JAX_PLATFORMS=cpu
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert gpus() == [Gpu(name, i << 30) for i, name in enumerate(names, 1)]


def test_a_driver_that_fails_is_said_and_one_that_is_not_there_is_no_gpu(driver, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setenv("CUDA_ERROR", "803")
    with pytest.raises(UserError, match="CUDA error 803"):
        gpus()
    monkeypatch.undo()
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    if not shutil.which("nvidia-smi"):
        assert gpus() == []
