"""Which GPUs the servers of a run see."""

from __future__ import annotations

import pytest

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.rollout import served
from jaxfp8rl.rollout.served import gpus_of_child


@pytest.mark.parametrize("link, gpus, engines, learner, first, seen", [
    ("nccl", "[1]", 1, None, 0, ["1"]),
    ("nccl", "[1, 2, 3, 4]", 2, None, 0, ["1,2", "3,4"]),
    ("cuda_ipc", "[]", 1, None, 0, [""]),  # as this process
    ("cuda_ipc", "[0]", 1, None, 0, ["0"]),
    ("cuda_ipc", "[1]", 1, None, 0, ["1,0"]),
    ("cuda_ipc", "[1, 2]", 2, None, 0, ["1,0", "2,0"]),
    ("cuda_ipc", "[1, 2]", 1, "3,0", 0, ["1,2,3"]),
    ("cuda_ipc", "[1]", 1, "1", 0, ["1"]),
    ("cuda_ipc", "[2]", 1, None, 1, ["2,1"]),  # JAX_LOCAL_DEVICE_IDS=1
    ("cuda_ipc", "[2]", 1, "3,0", 1, ["2,0"]),
])
def test_a_server_sees_its_gpus_and_by_cuda_ipc_the_learner_s(link, gpus, engines, learner, first, seen,
                                                              monkeypatch):
    """Its own come first: those are what vLLM uses."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(served, "_first_gpu", lambda: first)
    if learner:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", learner)
    r = load_config("demo", [
        "--rollout.engine", "served", "--rollout.link", link, "--rollout.server_gpus", gpus,
        "--rollout.engines", str(engines), "--precision.compute_dtype", "bfloat16"]).rollout
    assert [gpus_of_child(r, i) for i in range(engines)] == seen
