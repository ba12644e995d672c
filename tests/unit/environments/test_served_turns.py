"""Turns by engines in other processes: the next turn goes to the replica that has its prefix, and what it
found in its cache is counted. Stand-ins serve; a slow test has stock `vllm serve`."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import pytest
from stand_in import TOKEN, StandIn, published
from test_player import GUESS, TOKENIZER, requests

from bridges.served.vllm_client import Deadlines, VllmClient
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.environments.metrics import turn_metrics
from jaxfp8rl.environments.player import Player
from jaxfp8rl.environments.pool import Pool
from jaxfp8rl.monitors.jsonl import read_metrics
from jaxfp8rl.rollout.completion_json import completion_from_json, completion_to_json
from jaxfp8rl.training.loop import train


@contextlib.contextmanager
def fleet(count: int):
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(StandIn(published(16, 4, max_model_len=64, weights=1)))
                   for _ in range(count)]
        client = VllmClient([s.url for s in servers], TOKEN, Deadlines(1.0, 5.0, 2.0, 2.0))
        stack.callback(client.close)
        client.published()
        pool = Pool(GUESS, workers=1)
        stack.callback(pool.close)
        yield servers, client, Player(client, pool, TOKENIZER, lambda r, c: c, 4, 1)


def test_every_turn_of_a_group_is_asked_of_the_replica_that_has_its_prefix():
    with fleet(2) as (servers, client, player):
        groups = player.generate(requests(["1", "2", "3", "4"], n=3))
        contexts = [{tuple(body["token_ids"]) for body in s.asked} for s in servers]
        played = [c for g in groups for c in g if len(c.turns) > 1]
        assert len(played) > 6 and all(s.asked for s in servers)
        for c in played:
            [b] = c.branches
            whole = (*b.prompt, *b.token_ids.tolist())
            later = {whole[: len(b.prompt) + start] for start, _ in c.turns[1:]}
            assert any(later <= asked for asked in contexts), "its turns were asked of several replicas"
            prompts = [len(b.prompt) + start for start, _ in c.turns[1:]]
            # no more is new than the turn's last token and the answer to it, and some ask alike
            found, tokens = c.cached()
            assert sum(n - 2 for n in prompts) <= found < tokens == sum(prompts)
        hits, tokens = (sum(c.cached()[i] for c in played) for i in (0, 1))
        metrics = turn_metrics([c for g in groups for c in g])
        assert metrics["turns/cached_fraction"] == hits / tokens > 0.3
        again = [completion_from_json(completion_to_json(c)) for g in groups for c in g]
        assert turn_metrics(again) == metrics
        assert client._homes
        client.published()
        assert not client._homes, "what is cached is of other weights"


def test_a_session_leaves_a_replica_that_died():
    with fleet(2) as (servers, client, player):
        [[first]] = player.generate(requests(["1"]))
        home = next(s for s in servers if s.asked)
        home.close()
        [[second]] = player.generate(requests(["1"]))  # of the same name, and so the same session
        other = next(s for s in servers if s is not home)
        assert other.asked and second.token_ids.tolist() == first.token_ids.tolist()


def test_an_engine_that_does_not_say_is_not_counted():
    with fleet(1) as ([server], _, player):
        server._cached = lambda body, done: None
        answers = player.generate(requests(["1"], n=2))
        assert "turns/cached_fraction" not in turn_metrics([c for g in answers for c in g])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="vLLM is not installed")
@pytest.mark.parametrize("engine", ["served", "vllm"])
def test_vllm_finds_the_prefix_of_the_next_turn(engine, tmp_path, monkeypatch):
    """Two stock servers, or vLLM in the process. Its CPU build caches whole blocks of 128 tokens."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    settings = {
        "run.dir": tmp_path, "run.steps": 2, "run.save_every": 0, "sft.steps": 0, "optim.warmup_steps": 0,
        "task.kind": "environment", "task.name": f"{Path(__file__).with_name('odd_environment.py')}:Long",
        "task.options": "{}", "task.max_prompt_tokens": 160, "environment.max_turn_tokens": 1,
        "environment.workers": 1,
        "rollout.engine": engine, "rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 4,
        "rollout.max_new_tokens": 8, "rollout.kv_cache": "auto", "rollout.fp8_kernel": "emulated",
        "rollout.enforce_eager": "true", "precision.compute_dtype": "bfloat16", "train.row_tokens": 200,
        "train.rows_per_microbatch": 8, "model.config.max_position_embeddings": 256}
    if engine == "served":
        settings |= {"rollout.engines": 2, "rollout.link": "shared_memory"}
    train(load_config("demo", [w for k, v in settings.items() for w in (f"--{k}", str(v))]))
    for row in read_metrics(tmp_path / "metrics.jsonl")[1:]:
        assert row["turns/mean"] == 3 and row["turns/cached_fraction"] > 0.7
        assert row["mismatch/token_mult_prob_error"] < 1.01
