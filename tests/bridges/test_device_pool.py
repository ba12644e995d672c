"""The pool that JAX shares with an engine: what it chooses, and that it leaves a machine without a GPU
alone."""

from __future__ import annotations

import os

from bridges.inside_vllm import device_pool


def test_the_environment_has_the_last_word(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    device_pool.share()
    assert os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform"
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    device_pool.hold(), device_pool.give_back()  # another allocator: not ours to ask


def test_without_a_gpu_there_is_no_pool(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "cuda_async")
    device_pool.hold(), device_pool.give_back()
