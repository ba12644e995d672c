"""CUDA graphs that are captured while JAX allocates in another thread of the process."""

from __future__ import annotations

import contextlib
import threading

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")

from bridges.inside_vllm.build import captured_by_thread

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def another_thread_allocates():
    """Until the context ends, a thread calls cudaMalloc and cudaFree, as a compiler may."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            torch.cuda.empty_cache()
            torch.empty(2**26, dtype=torch.uint8, device="cuda")
            jnp.ones(2**20).block_until_ready()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    done.set()
    thread.join()


def captured(x):
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for i in range(2000):
            results = [x * i]
    graph.replay()
    torch.cuda.synchronize()
    return results[0]


def test_it_succeeds():
    assert jax.devices()[0].platform == "gpu"
    x = torch.arange(8.0, device="cuda")
    x * 2  # loads the kernel
    with another_thread_allocates(), captured_by_thread():
        for _ in range(5):
            assert torch.equal(captured(x), x * 1999)
