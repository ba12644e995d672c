"""Stock `vllm serve` on a GPU under CUDA graphs: weights by CUDA IPC and by NCCL are those that a file
brings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")
vllm = pytest.importorskip("vllm")

import stock_server  # noqa: E402
from stock_server import TOKEN, greedy  # noqa: E402

from bridges.served.served_transport import ServedTransport  # noqa: E402
from bridges.sources.array_source import random_source  # noqa: E402

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(
    not vllm.__version__.startswith("0.32."),
    reason=f"the plugin is for vLLM 0.32, and this is {vllm.__version__}")]
GRAPHS = "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**28)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environment")
    return stock_server.installed(folder), stock_server.model_folder(folder)


def published(url: str, kind: str, seed: int, folder) -> tuple[list[int], str, float]:
    """(tokens, the proof's content, seconds of the second publish)."""
    transport = ServedTransport(TOKEN, kind, urls=[url], slot_bytes=300_000, folder=folder)
    transport.open()
    try:
        source = random_source(transport.expected_manifest(), seed, convert=jnp.asarray)
        transport.publish(source, 1)
        receipt = transport.publish(source, 2)
        transport.verify(receipt)
        return greedy(url), receipt.content, receipt.seconds
    finally:
        transport.close()


@pytest.mark.parametrize("kind, ranks, learner, engines", [
    ("cuda_ipc", 1, 0, "0"), ("nccl", 1, 0, "1"), ("cuda_ipc", 2, 0, "0,1"), ("nccl", 2, 0, "1,2")])
def test_what_comes_from_a_gpu_is_what_a_file_brings(environment, tmp_path, kind, ranks, learner, engines):
    if (needed := max(map(int, engines.split(","))) + 1) > jax.local_device_count():
        pytest.skip(f"needs {needed} GPUs")
    seen = {"CUDA_VISIBLE_DEVICES": engines, "JAXFP8RL_FP8_KERNEL": "native"}
    torch.cuda.set_device(learner)
    with stock_server.serving(*environment, tmp_path, ranks, GRAPHS, seen) as url:
        by_file = [published(url, "file", seed, tmp_path)[:2] for seed in (1, 2)]
        assert by_file[0] != by_file[1]
        for seed in (2, 1):
            tokens, content, seconds = published(url, kind, seed, tmp_path)
            assert (tokens, content) == by_file[seed - 1]
            print(f"{kind}, {ranks} ranks: {seconds * 1e3:.0f} ms")
