"""A run that learns adapters over a base in four bits: engine and learner compute one policy, and share its
one copy."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from micro_run import rewarded
from tiny_run import config, metrics, words

from jaxfp8rl.checkpoint.export import export, quantize_folder
from jaxfp8rl.checkpoint.read_only import load_trained
from jaxfp8rl.cli.dry_run import dry_run_sft
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.memory.plan import memory_plan
from jaxfp8rl.models.config import how_to_get
from jaxfp8rl.models.loading import load_params, save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.packed import unpack_params
from jaxfp8rl.policy.adapters import base_weights, merged
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.training import loop
from jaxfp8rl.training.preflight import preflight
from jaxfp8rl.training.sft import prepare_sft

pytestmark = pytest.mark.usefixtures("quick_children")
LORA = {
    "sft__steps": 0, "lora__rank": 4, "lora__alpha": 8.0, "lora__dtype": "float32", "optim__lr": 0.02,
    "optim__warmup_steps": 0, "precision__recipe": "bf16", "precision__compute_dtype": "float32",
    "precision__weight_dtype": "float32", "rollout__kv_cache": "auto", "run__save_every": 1,
    "run__eval_problems": 4, "train__updates_per_step": 1,
}
VLLM = {"rollout__engine": "vllm", "lora__dtype": "bfloat16", "precision__weight_dtype": "bfloat16",
        "precision__compute_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A folder in NVFP4 of the demo's shape."""
    folder = tmp_path_factory.mktemp("four")
    model = model_config(config(folder / "run"))
    save_params(folder / "bf16", model, init_params(model, jax.random.key(0)))
    return quantize_folder(folder / "bf16", folder / "nvfp4", "nvfp4")


def run_of(base: Path, directory: Path, **changes) -> Config:
    given = words(directory, **LORA | changes | {"model__path": str(base), "model__tokenizer": config(
        directory).model.tokenizer})
    pairs = [pair for pair in zip(given[::2], given[1::2]) if not pair[0].startswith("--model.config")]
    return load_config("demo", [word for pair in pairs for word in pair] + ["--model.config", "{}"])


@pytest.mark.slow
def test_a_run_over_four_bits(base, tmp_path, monkeypatch):
    monkeypatch.setattr(RewardRunner, "score", rewarded)
    run = tmp_path / "run"
    loop.train(run_of(base, run, run__steps=2))
    first, second = metrics(run)[1:]
    assert min(first["grad_norm"], second["grad_norm"]) > 0
    assert max(first["mismatch/k3"], second["mismatch/k3"]) < 1e-6  # one policy, unmerged
    trained = load_trained(str(run))
    adapters = trained.params["layers"]["lora"]
    size = sum(x.nbytes for x in jax.tree.leaves(adapters))
    assert first["publish/bytes"] == second["publish/bytes"] == size  # the base is never sent
    # merged from the decoded base, and what has no adapter as it was
    base_in_four = base_weights(trained.cfg, trained.model)
    want = merged(trained.cfg, trained.model, unpack_params(base_in_four), trained.params)
    found = load_params(export(str(run), tmp_path / "out"))
    assert found[0].packed is None
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, np.asarray(b), rtol=2**-8), found[1], want)
    again = load_params(export(str(run), tmp_path / "four", "int4"))[0].packed
    assert again is not None and again.form == "int4"
    assert (export(str(run), tmp_path / "adapter", "adapter") / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_a_run_over_four_bits_in_vllm(base, tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")
    monkeypatch.setattr(RewardRunner, "score", rewarded)
    int4 = quantize_folder(base.parent / "bf16", tmp_path / "int4", "int4")
    loop.train(run_of(int4, tmp_path / "run", **VLLM, run__steps=3, run__save_every=0,
                      rollout__enforce_eager="true"))
    first, *rest = metrics(tmp_path / "run")[1:]
    assert all(row["grad_norm"] > 0 and row["mismatch/k3"] < 1e-6 for row in (first, *rest))
    assert first["publish/bytes"] == rest[0]["publish/bytes"] < 200_000  # the adapters alone


def test_the_plan_counts_packed_bytes(base, tmp_path):
    cfg = run_of(base, tmp_path / "run")
    model = model_config(cfg)
    plan = dict(memory_plan(cfg, model))
    _, params = load_params(base)
    adapters = 4 * sum(4 * sum(x) for x in [(128, 128), (128, 128), (128, 128), (128, 128)] + 3
                       * [(128, 128)])
    held = sum(x.nbytes for x in jax.tree.leaves(params))
    (policy,) = (size for what, size in plan.items() if what.startswith("policy"))
    assert "policy in float32, NVFP4 weights as codes and scales" in plan
    assert policy == held + adapters
    assert plan["engine: weights"] == adapters  # the base is the learner's
    assert plan["decoded weights of a layer (estimate)"] == 7 * 128 * 128 * 4


@pytest.mark.parametrize(("changes", "says"), [
    ({"lora__rank": 0}, "do not learn, and lora.rank = 0 trains all parameters\n.*lora.rank = 32"),
    ({"precision__recipe": "fp8_unified"}, 'precision.recipe = "fp8_unified": .*nvfp4.*\n.*"bf16"'),
    ({"lora__publish": "merged"}, 'lora.publish = "merged": .*nvfp4.*\n.*"adapters"'),
    ({**VLLM, "rollout__publish": "reload"}, 'rollout.publish = "reload": .*reads from their folder once'),
    ({**VLLM, "rollout__sleep": "drop_weights"}, "drop_weights.*once\n.*keep_weights"),
    ({**VLLM, "precision__weight_dtype": "float32", "lora__dtype": "float32"}, "weight_dtype.*in bfloat16"),
])
def test_other_ways_to_train_are_refused(base, tmp_path, changes, says):
    given = {k: v for k, v in LORA.items() if not (k.startswith("lora__") and changes.get("lora__rank") == 0)}
    with pytest.raises(ConfigError, match=says):
        monkey = run_of(base, tmp_path / "run",
                        **changes) if "lora__rank" not in changes else _plain(base, tmp_path, given)
        preflight(monkey, fresh=True)


def test_a_warm_start_says_what_to_do(base, tmp_path):
    given = {k: v for k, v in LORA.items() if not k.startswith("lora__")} | {"sft__steps": 4}
    cfg = _plain(base, tmp_path, given)
    wants = (r"has weights in four bits \(nvfp4\), and a warm start trains all parameters\n.*"
             r"jaxfp8rl quantize \S+/run/sft OUT --format nvfp4`.*lora.rank = 32")
    for start in (prepare_sft, dry_run_sft):
        with pytest.raises(ConfigError, match=wants):
            start(cfg)


def _plain(base: Path, tmp_path: Path, given: dict) -> Config:
    """A run of all parameters."""
    pairs = [pair for pair in zip(*[iter(words(tmp_path / "run", **given, model__path=str(base),
                                               model__tokenizer=config(
        tmp_path).model.tokenizer))] * 2) if not pair[0].startswith("--model.config")]
    return load_config("demo", [word for pair in pairs for word in pair] + ["--model.config", "{}"])


def test_a_folder_that_is_not_there_yet_is_made_by_quantize():
    assert how_to_get(Path("models/Qwen3-32B-NVFP4")).startswith(
        "`jaxfp8rl quantize models/Qwen3-32B models/Qwen3-32B-NVFP4 --format nvfp4` makes it of that BF16 "
        "folder (`hf download Qwen/Qwen3-32B")
