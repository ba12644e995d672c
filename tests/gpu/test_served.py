"""Stock `vllm serve` beside the learner on one GPU, as a run has it: sleep and wake, and a kill in a
publish."""

from __future__ import annotations

import contextlib
import os
import signal

import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")
vllm = pytest.importorskip("vllm")

from bridges.api import GenRequest, SamplingParams  # noqa: E402
from bridges.conformance import CHECKS, EngineUnderTest  # noqa: E402
from bridges.served.serve_process import ServeProcesses  # noqa: E402
from bridges.sources.array_source import ArraySource, random_source  # noqa: E402
from jaxfp8rl.config.toml import load_config  # noqa: E402
from jaxfp8rl.policy.shapes import engine_runs, model_config  # noqa: E402
from jaxfp8rl.rollout.engines import build_engine  # noqa: E402

pytestmark = [pytest.mark.timeout(1200), pytest.mark.skipif(
    not vllm.__version__.startswith("0.32."),
    reason=f"the plugin is for vLLM 0.32, and this is {vllm.__version__}")]
OPTIONS = [
    "--rollout.engine", "served", "--rollout.link", "cuda_ipc", "--rollout.gpu_memory_utilization", "0.1",
    "--rollout.kv_cache_gib", "0.25", "--rollout.kv_cache", "auto", "--precision.compute_dtype", "bfloat16",
    "--rollout.max_num_seqs", "8", "--task.max_prompt_tokens", "152",
    "--model.config.max_position_embeddings", "256", "--train.row_tokens", "256",
    "--train.rows_per_microbatch", "1",
]


@contextlib.contextmanager
def served(folder, monkeypatch, *options):
    """(an engine and its transport under test, the processes)."""
    started, init = [], ServeProcesses.__init__
    monkeypatch.setattr(ServeProcesses, "__init__",
                        lambda self, *args, **kwargs: (started.append(self), init(self, *args, **kwargs))[1])
    cfg = load_config("demo", [*OPTIONS, *options, "--run.dir", str(folder)])
    model = model_config(cfg)
    engine, transport = build_engine(cfg, model, engine_runs(cfg, model))
    with contextlib.closing(engine):
        metas = transport.expected_manifest()
        source = lambda seed: random_source(metas, seed, convert=jnp.asarray)
        yield EngineUnderTest(engine, transport, source, batches_alike=False), started[0]


def test_row_16_killed_in_the_middle_of_a_publish(tmp_path, monkeypatch):
    """Conformance over CUDA IPC with CUDA graphs on; then the engine's process is killed while it receives,
    and another gets the same publish in full."""
    with served(tmp_path, monkeypatch) as (e, processes):
        for check in CHECKS:
            check(e)
        assert e.publish(1).content, "the engine's process has proved what it holds"
        good, killed = e.source(2), []

        class Killing(ArraySource):
            def __iter__(self):
                for i, pair in enumerate(super().__iter__()):
                    if i == len(self.metas) // 2 and not killed:
                        os.killpg(processes.pid(0), signal.SIGKILL)
                        killed.append(i)
                    yield pair

        receipt = e.transport.publish(Killing(good.metas, good.arrays), 99)
        assert killed and e.engine.restarts == 1 and e.engine.weight_version() == receipt.version == 99
        assert receipt.content == e.transport.publish(good, 100).content
        e.sample()


@pytest.mark.parametrize("how", ["keep_weights", "drop_weights"])
def test_row_24_cycles_of_sleep_take_no_more_memory(tmp_path, monkeypatch, how):
    with served(tmp_path, monkeypatch, "--rollout.sleep", how) as (e, _):
        request = GenRequest("r", tuple(range(40)), SamplingParams(8, temperature=0.0))
        e.transport.publish(e.source(0), 0)
        said, awake, asleep = set(), [], []
        for version in range(1, 11):
            said.add(tuple(e.engine.generate([request])[0][0].token_ids.tolist()))
            e.engine.sleep()
            asleep.append(torch.cuda.mem_get_info()[0])
            e.engine.wake()
            e.transport.publish(e.source(0), version)
            awake.append(torch.cuda.mem_get_info()[0])
        assert len(said) == 1, "the same weights, other tokens"
        # a driver takes a page of 2 MiB for itself once, some time after the second
        assert awake[-1] >= awake[4] and asleep[-1] >= asleep[4], (awake, asleep)
        assert min(asleep) > awake[4] + 2**27, "sleep gives the cache back"
