"""Which engine `rollout.engine = "auto"` takes, and that it says so."""

import importlib.util
import json

import pytest

from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.errors import ConfigError

SMALL = ("--rollout.engine", "auto", "--precision.recipe", "fp8_unified")
WHOLE = ("--rollout.prompts_per_step", "8", "--rollout.samples_per_prompt", "8")


@pytest.fixture(autouse=True)
def vllm(monkeypatch, request):
    there = getattr(request, "param", True)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec",
                        lambda name, *more: there if name == "vllm" else find(name, *more))


@pytest.mark.parametrize("more, engine, says", [
    ((), "jax", "samples faster on an H100"),
    (("--precision.recipe", "bf16", "--rollout.kv_cache", "auto"), "vllm",
     "want all linears of the layers in FP8"),
    (("--precision.last_layers_bf16", "1"), "vllm", "want all linears"),
    (("--rollout.samples_per_prompt", "9"), "vllm", "with 72 sequences at once"),
    (("--model.config.num_hidden_layers", "36"), "vllm", "not measured faster with num_hidden_layers = 36"),
    (("--train.fsdp", "2"), "vllm", "beside a learner on one GPU alone"),
    (("--precision.exact", "engine"), "jax", "samples faster"),
    (("--rollout.samples_per_prompt", "9", "--precision.exact", "engine"), "jax", '"vllm" is refused: '),
    (("--rollout.sleep", "keep_weights"), "vllm", '"jax" is refused: rollout.sleep = "keep_weights"'),
])
def test_settings_shape_and_measurement_choose(more, engine, says, capsys):
    cfg = load_config("demo", [*SMALL, *WHOLE, *more])
    said = capsys.readouterr().err
    assert cfg.rollout.engine == engine and said.startswith(f'rollout.engine: "auto" takes "{engine}": ')
    assert says in said and said.count("\n") == 1
    assert f'\nengine = "{engine}"' in dump_config(cfg)  # a resumed run has the same


@pytest.mark.parametrize("vllm", [None], indirect=True)
def test_without_vllm_it_is_the_embedded_engine(vllm, capsys):
    assert load_config("demo", [*SMALL, "--train.fsdp", "2"]).rollout.engine == "jax"
    assert "vLLM is not installed here" in capsys.readouterr().err


def test_what_both_refuse_is_the_refusal_of_the_one_that_was_meant():
    with pytest.raises(ConfigError, match="rollout.link"):
        load_config("demo", [*SMALL, *WHOLE, "--rollout.link", "nccl"])


def test_a_folder_gives_the_shape(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4096, "num_hidden_layers": 36}))
    cfg = load_config("demo", [*SMALL, *WHOLE, "--model.path", str(tmp_path), "--model.config", "{}"])
    assert cfg.rollout.engine == "vllm"
    assert "with hidden_size = 4096 and num_hidden_layers = 36" in capsys.readouterr().err


def test_a_base_in_four_bits_stays_with_the_embedded_engine(vllm, tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4096, "quantization_config": {}}))
    cfg = load_config("demo", [*SMALL, *WHOLE, "--model.path", str(tmp_path), "--model.config", "{}"])
    assert cfg.rollout.engine == "jax" and "shares the learner's packed base" in capsys.readouterr().err
