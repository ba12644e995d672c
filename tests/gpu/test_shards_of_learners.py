"""A learner's shards go into stock `vllm serve` by NCCL: from one process, and from two, each of which sends
what its GPU holds. What arrives is what a file of one device brings."""

from __future__ import annotations

import sys

import jax
import pytest

torch = pytest.importorskip("torch")
vllm = pytest.importorskip("vllm")

import one_learner  # noqa: E402
import stock_server  # noqa: E402
from stock_server import TOKEN, greedy  # noqa: E402

from benchmarks.processes import said_by_learners  # noqa: E402
from bridges.served.served_transport import ServedTransport  # noqa: E402
from jaxfp8rl.distributed.mesh import ONE  # noqa: E402

pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(
    not vllm.__version__.startswith("0.32."),
    reason=f"the plugin is for vLLM 0.32, and this is {vllm.__version__}")]
GRAPHS = "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(2**28)


def published(url: str, kind: str, folder, config: str) -> tuple[list[str], list[int]]:
    """The contents of the receipts of both sources, and what is sampled after them."""
    transport = ServedTransport(TOKEN, kind, urls=[url], slot_bytes=100_000, folder=folder)
    transport.open()
    try:
        found = [transport.publish(s, i).content for i, s in enumerate(one_learner.sources(ONE, config), 1)]
        return found, greedy(url)
    finally:
        transport.close()


def by_processes(url: str, folder, config: str, kind: str, count: int) -> list[str]:
    """The same from `count` processes, each with a GPU of its own."""
    command = [sys.executable, one_learner.__file__, str(count), url, TOKEN, str(folder), config, kind]
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    said = said_by_learners(command, [shared | {"CUDA_VISIBLE_DEVICES": str(i)} for i in range(count)], 400)
    return next(line for line in said[0].splitlines() if len(line) == 129).split()


@pytest.mark.parametrize("learners, ranks", [(1, 1), (2, 1), (2, 2)])
def test_shards_by_nccl_are_what_a_file_brings(tmp_path, learners, ranks):
    if (needed := learners + ranks) > jax.local_device_count():
        pytest.skip(f"needs {needed} GPUs")
    paths, model = stock_server.installed(tmp_path), stock_server.model_folder(tmp_path)
    config = str(tmp_path / "bf16" / "config.json")
    seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(learners, needed))),
            "JAXFP8RL_FP8_KERNEL": "native"}
    torch.cuda.set_device(0)
    with stock_server.serving(paths, model, tmp_path, ranks, GRAPHS, seen) as url:
        want, tokens = published(url, "file", tmp_path, config)
        found = published(url, "nccl", tmp_path, config)[0] if learners == 1 else by_processes(
            url, tmp_path, config, "nccl", learners)
        assert found == want and greedy(url) == tokens
