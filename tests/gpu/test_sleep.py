"""Sleep and wake of vLLM in this process, twenty times."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tiny_vllm import CONFIG  # noqa: E402

from bridges.api import GenRequest, SamplingParams  # noqa: E402
from bridges.engines.vllm_engine import FP8, VllmEngine  # noqa: E402
from bridges.sources.array_source import random_source  # noqa: E402
from bridges.transports.vllm_inplace import VllmInplace  # noqa: E402

QWEN3 = CONFIG | {
    "vocab_size": 1000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False,
}
OPTIONS = {
    "weights": FP8, "max_model_len": 256, "max_num_seqs": 8, "gpu_memory_utilization": 0.1,
    "kv_cache_bytes": 2**28,
}


def test_row_24_twenty_cycles_of_sleep_take_no_more_memory():
    engine, transport = VllmEngine(QWEN3, sleep="drop_weights", **OPTIONS), VllmInplace()
    try:
        transport.open(engine)
        source = random_source(engine.expected_manifest(), 0, convert=jnp.asarray)
        transport.publish(source, 0)
        request = GenRequest("r", tuple(range(40)), SamplingParams(8, temperature=0.0))
        said, used, asleep = set(), [], []
        for version in range(1, 21):
            said.add(tuple(engine.generate([request])[0][0].token_ids.tolist()))
            engine.sleep()
            asleep.append(torch.cuda.mem_get_info()[0])
            engine.wake()
            transport.publish(source, version)
            free, stats = torch.cuda.mem_get_info()[0], jax.local_devices()[0].memory_stats()
            used.append((stats["bytes_in_use"], torch.cuda.memory_allocated(), -free))
        assert len(said) == 1, "the same weights, other tokens"
        # The tenth, because the driver takes a page of 2 MiB for itself once, some time after the second.
        assert all(now <= then for now, then in zip(used[-1], used[9])), used
        assert asleep[-1] >= asleep[9], asleep
        assert min(asleep) > -used[9][2] + 2**27, "sleep gives the cache back, and the weights"
    finally:
        engine.close()
