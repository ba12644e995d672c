"""The run of micro_run.py with an asynchronous engine; as a program, one that kills itself:

    python async_run.py ENGINE PLACE TIMES jaxfp8rl-words...

ENGINE "fake": the numpy engine, which publishes interrupt; "jax": the embedded engine, which samples whole
groups; "jax in flight": the same, interrupted; "served": two `vllm serve` processes, which publishes
interrupt.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import micro_run

from bridges.engines.fake_engine import Draft, FakeEngine, FakeTransport
from jaxfp8rl.config.schema import Config
from jaxfp8rl.publish.wire import wire_manifest
from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.training import context

FAKE = {"rollout.engine": "vllm", "rollout.max_staleness": 1, "rollout.in_flight": "true",
        "rollout.oversample": 1.25, "rollout.kv_cache": "auto",
        "gate.max_mean_gap": 100.0, "gate.max_gap": 100.0, "rollout.samples_per_prompt": 3}
JAX = {"rollout.max_staleness": 2}
JAX_IN_FLIGHT = {"rollout.max_staleness": 1, "rollout.max_num_seqs": 4, "rollout.in_flight": "true",
                 "rollout.oversample": 1.5, "rollout.max_new_tokens": 16}
SERVED = FAKE | {
    "rollout.engine": "served", "rollout.engines": 2, "rollout.link": "shared_memory", "rollout.restarts": 0,
    "rollout.fp8_kernel": "emulated", "rollout.enforce_eager": "true", "rollout.max_num_seqs": 16,
    "precision.recipe": "fp8_unified", "precision.weight_dtype": "bfloat16",
    "precision.compute_dtype": "bfloat16",
    "model.config.hidden_size": 128, "model.config.intermediate_size": 128,
    "model.config.num_attention_heads": 2,
    "model.config.num_key_value_heads": 2, "model.config.head_dim": 64,
    "model.config.max_position_embeddings": 256,
    "rollout.max_new_tokens": 200, "train.row_tokens": 220, "optim.lr": 0.001,
}
ENGINES = {"fake": FAKE, "jax": JAX, "jax in flight": JAX_IN_FLIGHT, "served": SERVED}


class Uneven(FakeEngine):
    """An engine that advances some of its completions by a token, chosen by what they are: groups finish in
    another order than they came, and some are in flight across several publishes."""

    def turn(self, draft: Draft) -> int:
        return zlib.crc32(f"{draft.request.request_id} {draft.index} {len(draft.tokens)}".encode())


def fake_world(cfg: Config, model, runs, phase, senders):
    engine = Uneven(model.vocab_size, manifest=wire_manifest(model, runs, "float32"), slots=3,
                        max_model_len=cfg.max_model_len)
    transport = FakeTransport()
    transport.open(engine)
    return engine, transport


def install(patch, engine: str) -> None:
    """`patch(owner, name, value)`: an engine of this kind, and micro_run's rewards."""
    patch(RewardRunner, "score", micro_run.rewarded)
    if engine == "fake":
        patch(context, "build_engine", fake_world)


def words(engine: str, directory: Path | str, **changes) -> list[str]:
    settings = {"precision.weight_dtype": "float32", "precision.compute_dtype": "float32"} | ENGINES[engine]
    settings |= {k.replace("__", "."): v for k, v in changes.items()}
    return micro_run.words(directory, **{k.replace(".", "__"): v for k, v in settings.items()})


def config(engine: str, directory: Path | str, **changes) -> Config:
    return micro_run.load_config("demo", words(engine, directory, **changes))


if __name__ == "__main__":
    from jaxfp8rl.cli.main import main

    install(setattr, sys.argv[1])
    micro_run.kill_at(sys.argv[2], int(sys.argv[3]))
    sys.exit(main(sys.argv[4:]))
