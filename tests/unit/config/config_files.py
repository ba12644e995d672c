"""A valid config, written to a file, and its refusals."""

from __future__ import annotations

import pytest

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import ConfigError

GOOD = """\
[run]
dir = "runs/x"
steps = 3

[model]
tokenizer = "chars:0123456789+="
[model.config]
hidden_size = 128
eos_token_id = [1, 2]

[task]
kind = "arithmetic"
max_prompt_tokens = 16

[rollout]
prompts_per_step = 4
samples_per_prompt = 2
max_new_tokens = 8

[train]
row_tokens = 32

[optim]
lr = 1e-6
"""


def refusal(path: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as e:
        load_config(path, overrides)
    return str(e.value)
