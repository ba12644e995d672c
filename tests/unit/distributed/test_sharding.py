"""A learner on several devices computes what it computes on one (sharded_learner.py), and says what does not
divide."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxfp8rl.config.rules import check
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.distributed.mesh import make_mesh_layout
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.policy.shapes import check_divides


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) for case in ("high", "experts", "fp8")])
def test_it_computes_what_one_device_does_and_publishes_the_same_bytes(case):
    """Two updates: scores, masters, metrics; micro-batches that are empty, on all devices or on all but one;
    one compilation.

    In FP8, sums in another order tip a rounding here and there.
    """
    program = Path(__file__).parent / "sharded_learner.py"
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
                                "PYTHONPATH": str(program.parents[3])}
    done = subprocess.run([sys.executable, program, case], env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.stdout.endswith("equal\n"), done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_learn_on_two_devices_as_on_one(tmp_path):
    """The base is divided along "fsdp", adapters are whole on each device. Along "data" both are whole."""
    program, tests = Path(__file__).parent / "adapters_on_devices.py", Path(__file__).parents[2]
    paths = [tests.parent, *(tests / name for name in ("e2e", "faults", "bridges", "unit/config"))]
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run([sys.executable, program, tmp_path, "fsdp"], env=environment, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.stdout.endswith("equal\n"), done.stdout[-3000:]


def model(**change) -> ModelConfig:
    return ModelConfig.from_hf(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 64, "hidden_size": 256,
         "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
         "tie_word_embeddings": True} | change
    )


def test_what_does_not_divide_is_named():
    check_divides(4, 2, model(), quantized=False)
    # SmolLM2, whose odd linears are excluded from FP8
    check_divides(1, 1, model(head_dim=66), quantized=True)
    check_divides(2, 1, model(num_key_value_heads=4), quantized=True)
    bad = {
        (2, 1,
         True): "train.fsdp = 2 does not divide the 128 rows of model.layers.0.self_attn.k_proj.weight "
                "in whole blocks",
        (3, 1, False): "train.fsdp = 3 does not divide the 64 rows of model.embed_tokens.weight",
        (1, 4, False): "train.tensor = 4 does not divide num_key_value_heads = 2: a device holds whole heads",
        (33, 2,
         False): r"train.fsdp \* train.tensor = 66 does not divide the 64 rows of model.embed_tokens.weight",
    }
    for (fsdp, tensor, quantized), says in bad.items():
        with pytest.raises(ConfigError, match=says):
            check_divides(fsdp, tensor, model(), quantized)
    experts = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 6,
               "num_experts_per_tok": 2,
               "moe_intermediate_size": 128, "norm_topk_prob": True}
    check_divides(3, 2, model(vocab_size=66, hidden_size=384, head_dim=66, **experts), quantized=False)
    with pytest.raises(ConfigError, match=r"train.fsdp \* train.tensor = 4 does not divide num_experts = 6"):
        check_divides(2, 2, model(**experts), quantized=False)
    with pytest.raises(ConfigError, match=r"train.fsdp = 1000 \* train.tensor = 2: this process has"):
        make_mesh_layout(fsdp=1000, tensor=2)


@pytest.mark.parametrize(
    "options, says",
    [
        (["--train.rows_per_microbatch", "7"], "does not divide train.rows_per_microbatch = 7"),
        (["--monitor.precision_every", "3"], "monitor.precision_every is for a learner on one device"),
        (["--rollout.kv_cache", "fp8", "--rollout.kv_scales", "calibrated"],
         "kv_scales = .calibrated. is for a learner on one"),
    ],
)
def test_what_is_only_there_on_one_device_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        check(load_config("demo", ["--train.fsdp", "2", "--run.dir", "unused", *options]))
