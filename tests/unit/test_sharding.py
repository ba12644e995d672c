"""A learner on several devices computes what it computes on one (sharded_learner.py), and says what does not divide."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.sharding import check_divides, make_layout
from jaxfp8rl.toml_config import load_config


@pytest.mark.parametrize("case", ["high", pytest.param("fp8", marks=pytest.mark.slow)])
def test_it_computes_what_one_device_does_and_publishes_the_same_bytes(case):
    """Two updates: scores, masters, metrics; micro-batches that are empty, on all devices or on all but one; one compilation.

    In FP8, sums in another order tip a rounding here and there.
    """
    program = Path(__file__).parent / "sharded_learner.py"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                                "PYTHONPATH": str(program.parent.parent.parent)}  # fmt: skip
    done = subprocess.run([sys.executable, program, case], env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)  # fmt: skip
    assert done.stdout.endswith("equal\n"), done.stdout[-3000:]


def model(**change) -> ModelConfig:
    return ModelConfig.from_hf(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 256,
         "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
         "tie_word_embeddings": True} | change
    )  # fmt: skip


def test_what_does_not_divide_is_named():
    check_divides(4, model(), quantized=False)
    check_divides(2, model(num_key_value_heads=4), quantized=True)
    with pytest.raises(ConfigError, match="does not divide the 128 rows of model.layers.0.self_attn.k_proj.weight in whole"):
        check_divides(2, model(), quantized=True)
    with pytest.raises(ConfigError, match="train.fsdp = 3 does not divide the 64 rows of model.embed_tokens.weight"):
        check_divides(3, model(), quantized=False)
    with pytest.raises(ConfigError, match="train.fsdp = 1000: this process has"):
        make_layout(1000)


@pytest.mark.parametrize(
    "options, says",
    [
        (["--train.rows_per_microbatch", "7"], "does not divide train.rows_per_microbatch = 7"),
        (["--monitor.precision_every", "3"], "monitor.precision_every is for a learner on one device"),
        (["--rollout.kv_cache", "fp8", "--rollout.kv_scales", "calibrated"], "kv_scales = .calibrated. is for a learner on one"),
    ],
)
def test_what_is_only_there_on_one_device_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        load_config("demo", ["--train.fsdp", "2", "--run.dir", "unused", *options]).check()
