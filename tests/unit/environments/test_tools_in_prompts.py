"""A run with tools: the prompts that name them, the form of their calls, and what is refused before it
starts."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from chat_templates import FAMILIES, tokenizer

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.environments.opening import form_of_run, world_of
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.rollout.problems import load_data

QUESTION = [{"role": "user", "content": "How much is 3 * 4?"}]


def config(folder, name: str, *words: str):
    tokenizer(name).save(str(folder / "tokenizer"))
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": QUESTION, "answer": "12"}) + "\n")
    (folder / "run.toml").write_text(f"""
[run]
dir = "{folder}/run"
steps = 1
[model]
config = {{vocab_size = 400}}
tokenizer = "{folder}/tokenizer"
[task]
kind = "file"
path = "{folder}/rows.jsonl"
max_prompt_tokens = 4000
options = {{held_out_fraction = 0.0}}
[rollout]
prompts_per_step = 1
samples_per_prompt = 2
max_new_tokens = 96
[train]
row_tokens = 4096
[environment]
tools = ["calculator", "own_tools.py:half"]
""")
    (folder / "own_tools.py").write_text('def half(n: float) -> float:\n    "Halve a number."\n   '
                                         ' return n / 2\n')
    return load_config(str(folder / "run.toml"), list(words))


@pytest.mark.parametrize("name", ["Qwen3", "Gemma"])
def test_a_prompt_names_the_tools(name, tmp_path):
    """By the template, or in words before the first message where it has no place for them."""
    cfg = config(tmp_path, name)
    data = load_data(cfg, SimpleNamespace(vocab_size=400))  # pyright: ignore[reportArgumentType]
    text = data.tokenizer.decode(data.train[0].token_ids, skip_special_tokens=False)
    for part in ("Halve a number.", "Work out an arithmetic expression.", "How much is 3 * 4?"):
        assert part in text
    assert ("```tool_code" in text) == (name == "Gemma")
    world = world_of(cfg, data.tokenizer)
    assert (world.tools, world.form) == (cfg.environment.tools, {"Qwen3": "hermes", "Gemma": "gemma"}[name])
    assert world.folder == str(tmp_path), "the module lies beside the config"


def test_a_template_that_shows_no_form_needs_one(tmp_path):
    cfg = config(tmp_path, "Mistral")
    with pytest.raises(ConfigError, match="does not show how a call is written"):
        form_of_run(cfg, tokenizer("Mistral"))
    assert form_of_run(config(tmp_path, "Mistral", "--environment.tool_calls", "llama"),
                       tokenizer("Mistral")) == "llama"
    assert set(FAMILIES) > {"Mistral"}


def test_a_tool_that_cannot_be_imported_stops_before_anything_loads(tmp_path):
    cfg = config(tmp_path, "Qwen3", "--environment.tools", '["own_tools.py:third"]')
    with pytest.raises(ConfigError,
                       match=r'environment.tools: module "own_tools.py" has no class or function "third"'):
        load_data(cfg, SimpleNamespace(vocab_size=400))  # pyright: ignore[reportArgumentType]
