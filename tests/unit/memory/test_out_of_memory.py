"""Memory that runs out is explained: what was planned, what was held, and what to change."""

from __future__ import annotations

import gc
import os
import re
import types

import jax
import jax.numpy as jnp
import pytest
from eight_b import FULL, H200, MODEL, QWEN3_8B, config

from jaxfp8rl import gpus
from jaxfp8rl.checkpoint.store import DIGESTS
from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError, OutOfMemory
from jaxfp8rl.evaluate.pass_at_k import with_rows
from jaxfp8rl.gpus import FRACTION, HOST_LIMIT, OLD_FRACTION
from jaxfp8rl.memory import fit, held
from jaxfp8rl.memory.fit import (
    check_memory,
    explained,
    explained_alone,
    explained_evaluation,
    needs,
)
from jaxfp8rl.memory.plan import evaluation_plan, memory_plan, moments_on_host
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.module import init_params
from jaxfp8rl.monitors.clock import Clock
from jaxfp8rl.optim.adamw import make_optimizer
from jaxfp8rl.optim.guard import init_state
from jaxfp8rl.rollout import gpu_memory


@pytest.fixture
def saved(tmp_path):
    """A run directory with a checkpoint in it."""
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "2" / DIGESTS).touch()
    return {"dir": str(tmp_path)}


@pytest.fixture
def h100(monkeypatch):
    """A device of 79 GiB, of which 60 are in use."""
    monkeypatch.setattr(fit, "device_memory", lambda: 79 * 2**30)
    monkeypatch.setattr(held, "device_in_use", lambda: 60 * 2**30)


def ran_out(cfg: Config, text: str, phase: str = "update") -> OutOfMemory:
    with pytest.raises(OutOfMemory) as caught, explained(cfg), Clock()(phase):
        error = jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {text}")
        error.add_note("JAX has removed its internal frames")  # as it says of what leaves a jitted function
        raise error
    return caught.value


def rows(e: OutOfMemory) -> dict[str, list[float]]:
    """The figures of each row of the table."""
    found = re.findall(r"^  ((?: +[\d.]+){1,2})  (\D.*)$", e.message, re.MULTILINE)
    return {what.strip().split(",")[0]: [float(x) for x in figures.split()] for figures, what in found}


def test_memory_that_runs_out_is_explained_by_phase_plan_and_what_was_held(saved, h100):
    cfg = config(run=saved, optim={"offload": True})
    e = ran_out(cfg, "Out of memory while trying to allocate 24.50GiB.")
    assert "the 79.0 GiB of the device that this run may take ran out (phase: update); the plan of an " \
        "update" in e.message
    assert e.message.endswith("\n  RESOURCE_EXHAUSTED: Out of memory while trying to allocate 24.50GiB.")
    table, plan = rows(e), dict(memory_plan(cfg, MODEL))
    activations = next(size for what, size in plan.items() if what.startswith("activations")) / 2**30
    assert table["activations of a micro-batch"] == [pytest.approx(activations, abs=0.01)]
    assert table["master weights"][0] == pytest.approx(15.26, abs=0.01)
    assert table["asked for when it failed"] == [24.5]
    planned, wanted = table["in all"]
    assert planned == pytest.approx(needs(cfg, MODEL, H200)["an update"] / 2**30, abs=0.01)
    assert wanted == 84.5
    # 5.5 GiB too much were seen, although the plan fits
    assert planned < 79 and e.next_step.startswith(
        "each of these makes it fit, the cheapest first:\n    train.row_tokens")
    spare = re.search(r"train.row_tokens = 8256  \(([\d.]+) GiB less, ([\d.]+) to spare", e.next_step)
    assert float(spare[1]) - float(spare[2]) == pytest.approx(5.5, abs=0.06)


def test_another_error_stays_what_it_is():
    with pytest.raises(jax.errors.JaxRuntimeError), explained(config()):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_where_the_device_is_not_known_what_was_asked_for_is_what_is_saved():
    e = ran_out(config(), "Out of memory while trying to allocate 1073741824 bytes.")
    assert "GiB less, " in e.next_step


@pytest.mark.parametrize("text, size", [
    ("Out of memory while trying to allocate 58 bytes.", 58), ("Out of memory allocating 1,024 bytes", 1024),
    ("Failed to allocate request for 1.50GiB (1610612736B) on device ordinal 0", 0),
    ("Out of memory while trying to allocate 2.25KiB", 2304), ("Out of memory.", 0),
])
def test_the_error_says_what_was_asked_for(text, size):
    assert held.asked(text) == size


def test_arrays_are_counted_by_kind():
    """A run's masters and moments, of equal shapes and types, and an array of its own. No array of another
    test has such a shape and is taken for one of them."""
    small = {k: v for k, v in QWEN3_8B.items()} | {
        "vocab_size": 131, "hidden_size": 1408, "intermediate_size": 1664, "num_hidden_layers": 2,
        "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 1152}
    model = ModelConfig.from_hf(small)
    cfg = config(model={"config": small}, optim=FULL | {"first_moment": "float8"})
    gc.collect()
    kept = jax.live_arrays()  # so that no array of other tests goes in between
    before = held.usage("", held.kinds_of(cfg, model))
    state = init_state(init_params(model, jax.random.key(0)), make_optimizer(cfg.optim, cfg.updates))
    more = jnp.ones((7, 11), jnp.float32)
    after = held.usage("trying to allocate 8 bytes", held.kinds_of(cfg, model))
    plan = {what.split(",")[0]: size for what, size in memory_plan(cfg, model)}
    for kind in (held.MASTERS, held.MOMENTS):
        assert after.items[kind] - before.items[kind] == plan[kind]
    others = after.items[held.OTHERS] - before.items[held.OTHERS]
    assert more.nbytes <= others < more.nbytes + 100, "the counts of the state are arrays, too"
    assert after.wanted - before.wanted == plan[held.MASTERS] + plan[held.MOMENTS] + others + 8
    del state, kept


def test_what_to_change_and_the_way_on_are_those_of_a_run_that_has_saved_something_or_nothing(
        saved, tmp_path, h100, monkeypatch):
    monkeypatch.setattr(fit, "device_memory", lambda: 100 * 2**30)
    optim = {"second_moment": "float32"}
    said = lambda run: ran_out(config(run=run, optim=optim), "Out of memory.").next_step
    going_on, anew = said(saved), said({"dir": str(tmp_path / "new")})
    assert "optim.offload = true" in going_on and going_on.endswith("\n  then --resume")
    assert "moment" not in going_on.replace("moments cross", ""), "a run does not go on with it"
    assert anew.endswith("\n  then start again: nothing has been saved yet")
    assert 'optim.first_moment = "float8"' in anew


def test_without_vllm_jax_may_take_nearly_all_of_a_gpu_and_a_plan_is_held_to_that(monkeypatch):
    """By itself JAX takes three quarters: a plan of 70 GiB would end on an H100. It refuses two such
    variables, and the user's counts."""
    for name in (FRACTION, OLD_FRACTION):
        monkeypatch.delenv(name, raising=False)
    cfg = config(rollout={"engine": "jax", "kv_cache_gib": None, "sleep": "off"})
    plan = sum(size for _, size in memory_plan(cfg, MODEL))
    monkeypatch.setattr(gpu_memory, "device_memory", lambda: int(plan / 0.9))
    check_memory(cfg, True)
    assert os.environ[FRACTION] == "0.95"
    monkeypatch.setattr(gpu_memory, "device_memory", lambda: int(plan / 0.97))
    with pytest.raises(ConfigError, match=f"needs {plan / 2**30:.1f} GiB, the device has "
                                          f"{0.95 * plan / 0.97 / 2**30:.1f} for it"):
        check_memory(cfg, True)
    monkeypatch.delenv(FRACTION)
    monkeypatch.setenv(OLD_FRACTION, "0.98")
    check_memory(cfg, True)
    assert FRACTION not in os.environ


def test_a_warm_start_alone_that_runs_out_says_what_helps_it(tmp_path, monkeypatch):
    for name in (FRACTION, OLD_FRACTION):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gpu_memory, "device_memory", lambda: 80 * 2**30)
    cfg = config(run={"dir": str(tmp_path)}, sft={"steps": 2})
    (tmp_path / "own" / "1").mkdir(parents=True)
    (tmp_path / "own" / "1" / DIGESTS).touch()
    with pytest.raises(OutOfMemory) as caught, explained_alone(cfg, "own"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: trying to allocate 2.00GiB.")
    assert "the 76.0 GiB of the device" in caught.value.message
    assert "the plan of the warm start" in caught.value.message and "initial weights" in caught.value.message
    assert "rollout" not in caught.value.next_step and caught.value.next_step.endswith("then --resume")


def evaluation_that_ran_out(cfg: Config, completions: int, of_run: bool) -> OutOfMemory:
    cfg = with_rows(cfg, completions)
    with pytest.raises(OutOfMemory) as caught, explained_evaluation(cfg, of_run), Clock()("gate"):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: trying to allocate 24.50GiB.")
    return caught.value


def test_an_evaluation_that_runs_out_has_a_plan_without_an_optimiser(h100):
    """vLLM holds its weights, its cache and what CUDA takes."""
    cfg = config(train={"remat": "none"})
    e = evaluation_that_ran_out(cfg, 100, of_run=True)
    assert "ran out (phase: gate); the plan of an evaluation beside what was held" in e.message
    table = rows(e)
    assert table["master weights"][0] == pytest.approx(15.26, abs=0.01)  # of a run, in bfloat16
    assert not any("moments" in what or "gradients" in what for what in table)
    own = sum(size for _, size in evaluation_plan(cfg, MODEL, "bfloat16"))
    vllm = needs(cfg, MODEL, H200)["a rollout"] - sum(size for _, size in memory_plan(cfg, MODEL)[:3])
    assert table["in all"][0] == pytest.approx((own + vllm) / 2**30, abs=0.01)
    assert "rollout.kv_cache_gib = 9.5  (9.5 GiB less, 4.0 to spare" in e.next_step
    assert not re.search("optim|remat|sleep", e.next_step) and e.next_step.endswith("run the command again")
    double = rows(evaluation_that_ran_out(cfg, 100, of_run=False))["master weights"][0]
    assert double == pytest.approx(2 * 15.26, abs=0.01), "a config's weights are read in float32"


def test_the_embedded_engine_of_an_evaluation_decodes_as_many_as_it_has_rows_for(monkeypatch):
    """And a step only those that it asks for, 64 here, for which any batch has room."""
    cfg = config(rollout={"engine": "jax", "kv_cache_gib": None, "sleep": "off", "max_num_seqs": 256})
    cache = lambda plan: dict(plan)["engine: keys and values"]
    step = cache(memory_plan(cfg, MODEL))
    of = lambda completions: cache(evaluation_plan(with_rows(cfg, completions), MODEL, "bfloat16"))
    assert of(1) == of(64) == step and of(10**6) == of(256) > 3.9 * step
    monkeypatch.setattr(gpu_memory, "device_memory", lambda: 80 * 2**30)
    monkeypatch.setattr(fit, "device_memory", lambda: 80 * 2**30)
    assert "rollout.max_num_seqs = 128" in evaluation_that_ran_out(cfg, 1000, of_run=True).next_step


def test_what_jax_holds_in_reserve_is_not_taken_for_the_engines(monkeypatch):
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_in_use": 40 * 2**30, "pool_bytes": 70 * 2**30})
    monkeypatch.setattr(held.jax, "local_devices", lambda: [device])
    monkeypatch.setattr(held, "device_in_use", lambda: 71 * 2**30)
    found = held.usage("")
    assert found.items[held.REST] == 2**30 and found.wanted == 41 * 2**30


def test_what_others_hold_of_the_gpu_is_said_at_the_start_and_when_memory_runs_out(monkeypatch):
    """As a second run on an H100 would see it: its own settings are not at fault."""
    monkeypatch.setattr(fit, "device_memory", lambda: 79 * 2**30)
    monkeypatch.setattr(held, "device_in_use", lambda: 70 * 2**30)
    said = []
    with pytest.raises(OutOfMemory) as caught, explained(config()) as note:
        said.append(note)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: trying to allocate 24.50GiB.")
    assert said[0].startswith("other processes held 70.0 of the GPU's 79.0 GiB") and "nvidia-smi" in said[0]
    assert f"\n  when this began, {said[0]}\n  RESOURCE_EXHAUSTED" in caught.value.message
    monkeypatch.setattr(held, "device_in_use", lambda: 2**29)  # a context
    with explained(config()) as note:
        assert note == ""


def test_host_memory_that_runs_out_is_not_taken_for_the_devices(h100):
    e = ran_out(config(optim={"offload": True}), "Out of host memory trying to allocate 2.00GiB.")
    assert re.match(r"[\d.]+ GiB of host memory ran out \(phase: update\)\n  RESOURCE_EXHAUSTED", e.message)
    assert "optim.first_moment" in e.next_step and "train." not in e.next_step


def test_moments_in_host_memory_may_have_all_of_it_and_no_more(monkeypatch, tmp_path):
    """XLA stops at 64 GiB, which those of 9 B parameters in float32 pass. A container's limit counts."""
    monkeypatch.delenv(HOST_LIMIT, raising=False)
    cfg = config(optim=FULL | {"offload": True})
    moments = moments_on_host(cfg, MODEL)
    assert moments > 60 * 2**30 and moments_on_host(config(), MODEL) == 0
    monkeypatch.setattr(fit, "device_memory", lambda: H200)
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(gpus, "LIMITS", (tmp_path / "absent", limit))
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 2**18, "SC_PAGE_SIZE": 2**20}.__getitem__)
    limit.write_text("max\n")
    check_memory(cfg, True)
    assert os.environ[HOST_LIMIT] == "256"
    limit.write_text(f"{moments - 2**30}\n")
    with pytest.raises(ConfigError, match=r"optim.offload: Adam's moments take 61.0 GiB of host memory, and "
                                          r"there are 60.0"):
        check_memory(cfg, True)
