"""Servers of a fake engine for the tests of engines in another process."""

from __future__ import annotations

import contextlib
import os
import signal
import sys

import pytest

from bridges.conformance import EngineUnderTest
from bridges.engines.fake_engine import FakeEngine, FakeTransport
from bridges.served.remote_engine import Deadlines, RemoteEngine, spawn
from bridges.served.remote_file import RemoteFile
from bridges.sources.array_source import random_source

TOKEN = "a token of the tests, 32 letters"
SHORT = Deadlines(connect=1.0, generate=1.0, publish=1.0, call=1.0)
SERVER = [sys.executable, "-m", "bridges.served.engine_server"]
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 500, "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e4,
    "hidden_act": "silu", "attention_bias": False, "eos_token_id": 7,
}
TINY = {"max_model_len": 256, "max_num_seqs": 32, "enforce_eager": True}


def under(engine: RemoteEngine, transport: RemoteFile | None = None, scale: float = 1.0,
          **kwargs) -> EngineUnderTest:
    transport = transport or RemoteFile()
    transport.open(engine)
    metas = engine.expected_manifest()
    return EngineUnderTest(engine, transport, lambda seed: random_source(metas, seed, scale), **kwargs)


@pytest.fixture(scope="module")
def remote():
    with spawn("fake") as engine:
        yield under(engine)


@pytest.fixture
def own():
    """A child process owned by the test, which may damage it, with short deadlines."""
    with spawn("fake", faults={"seconds": 0.0}, deadlines=SHORT) as engine:
        yield under(engine)
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine.pid, signal.SIGKILL)


@pytest.fixture
def served(serving, tmp_path):
    """(the engine itself, the same engine over the wire); the server is a thread of this process."""
    engine, transport = FakeEngine(), FakeTransport()
    transport.open(engine)
    with serving(engine, transport, tmp_path) as url:
        yield engine, under(RemoteEngine(url, TOKEN, Deadlines(2.0, 5.0, 5.0, 5.0)))
