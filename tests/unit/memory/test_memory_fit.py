"""A run that cannot fit is refused before anything loads, and the error names the settings that save most."""

from __future__ import annotations

import re

import jax
import pytest

from benchmarks.common import config as shape
from jaxfp8rl.checkpoint.store import DIGESTS
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError, OutOfMemory
from jaxfp8rl.memory.fit import (
    ENGINE_REST,
    WARM,
    _savings,
    check_fits,
    check_warm_start,
    explained,
    format_needs,
    needs,
)
from jaxfp8rl.memory.plan import memory_plan, warm_start_plan
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.monitors.clock import Clock

H200 = 150_754_820_096  # bytes, by the driver
QWEN3_8B = shape("8b")
MODEL = ModelConfig.from_hf(QWEN3_8B)


def config(**sections) -> Config:
    base = {
        "run": {"dir": "runs/x", "steps": 1},
        "model": {"config": QWEN3_8B, "tokenizer": "chars:01"},
        "task": {"kind": "arithmetic", "max_prompt_tokens": 32},
        "rollout": {
            "engine": "vllm", "prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 4096,
            "kv_cache": "fp8",
            "kv_cache_gib": 19.0, "sleep": "drop_weights",
        },
        "precision": {"recipe": "fp8_unified"},
        "optim": {"master": "bfloat16", "first_moment": "float8", "second_moment": "bfloat16"},
        "train": {"row_tokens": 16512, "rows_per_microbatch": 1, "remat": "layer"},
    }
    return Config.model_validate({name: {**base.get(name, {}), **sections.get(name, {})} for name in base
                                  | sections})


def test_8b_fits_an_h200_with_the_engine_asleep_and_needs_more_with_it_awake():
    cfg, awake = config(), config(rollout={"sleep": "off"})
    check_fits(cfg, MODEL, H200)
    plan = sum(size for _, size in memory_plan(cfg, MODEL))
    asleep = needs(cfg, MODEL, H200)
    assert plan < asleep["an update"] < 1.04 * plan and asleep["a rollout"] < asleep["an update"]
    more = needs(awake, MODEL, H200)["an update"] - asleep["an update"]
    assert 28e9 < more < 31e9  # 9.4 GB of weights, 19 GiB of cache
    assert "during a rollout" in format_needs(cfg, MODEL)


def test_the_start_has_the_weights_in_float32_too_each_device_its_part():
    one, two, warm = (needs(config(train=t, sft=s), MODEL, H200)["the start"] for t, s in (
        ({}, {}), ({"fsdp": 2, "rows_per_microbatch": 2}, {}),
        ({"fsdp": 2, "rows_per_microbatch": 2}, {"steps": 1})
    ))
    masters, moments = (size for _, size in memory_plan(config(), MODEL)[:2])
    weights = 2 * masters  # which are in bfloat16
    assert one - two == pytest.approx((weights + masters + moments) / 2, abs=1)
    assert warm - two == pytest.approx(weights / 2, abs=1)


def test_a_warm_start_that_cannot_fit_is_refused_where_there_will_be_one():
    """One device makes it whole, however many share what comes after; where the engine may sleep it does. It
    is no part of a run that goes on, and alone there is no engine beside it."""
    four = {"train": {"fsdp": 4, "rows_per_microbatch": 4}}
    cfg, awake = (config(**four, sft={"steps": 1}, rollout={"sleep": sleep})
                  for sleep in ("drop_weights", "off"))
    plan = sum(size for _, size in warm_start_plan(cfg, MODEL))
    needed, engine = needs(cfg, MODEL, H200), needs(awake, MODEL, H200)[WARM] - needs(cfg, MODEL, H200)[WARM]
    assert plan == sum(size for _, size in warm_start_plan(config(train={"rows_per_microbatch": 4}), MODEL))
    assert needed[WARM] == max(needed.values()) == plan + ENGINE_REST and 28e9 < engine < 31e9
    check_fits(cfg, MODEL, needed[WARM])
    alone = "^the warm start needs .*\n.*; or run the warm start by itself: jaxfp8rl sft"
    with pytest.raises(ConfigError, match=alone):
        check_fits(cfg, MODEL, needed[WARM] - 1)
    check_fits(cfg, MODEL, needed[WARM] - 1, fresh=False)
    check_fits(config(**four), MODEL, needed[WARM] - 1)
    alone = config(sft={"steps": 1}, rollout={"sleep": "off"},
                   train={"rows_per_microbatch": 4, "remat": "mlp"})
    with pytest.raises(ConfigError, match="^the warm start needs ") as caught:
        check_warm_start(alone, MODEL, plan)
    assert "train.r" in str(caught.value) and not re.search("rollout|sft", str(caught.value))
    check_warm_start(config(), MODEL, plan)


def test_the_reference_of_a_kl_is_there_all_the_time_and_in_float32_too_when_it_is_made():
    plain, held = (needs(config(loss=loss), MODEL, H200) for loss in ({}, {"kl_coef": 0.01}))
    masters, _, policy = (size for _, size in memory_plan(config(), MODEL)[:3])
    for moment, more in {"the start": 2 * masters + policy, "an update": policy, "a rollout": policy}.items():
        assert held[moment] - plain[moment] == more


def test_what_is_said_to_help_helps_by_as_much():
    cfg = config(optim={"master": "float32", "first_moment": "float32", "second_moment": "float32"},
                 train={"remat": "none"})
    with pytest.raises(ConfigError) as caught:
        check_fits(cfg, MODEL, H200)
    said = str(caught.value)
    assert said.startswith("an update needs ") and f"the device has {H200 / 2**30:.1f}" in said
    knobs = [knob.split(" = ")[0] for knob in re.split("; |savings: ", said)[1:]]
    assert knobs == ["train.remat", "train.fsdp", "optim.master"] and 'train.remat = "layer"' in said
    gains = [float(gain) for gain in re.findall(r"\(([\d.]+) GiB less\)", said)]
    assert gains == sorted(gains, reverse=True)
    before = needs(cfg, MODEL, H200)["an update"]
    after = needs(config(optim=cfg.optim.model_dump()), MODEL, H200)["an update"]
    assert f"{(before - after) / 2**30:.1f} GiB less" in said


def test_no_change_is_advised_that_would_be_refused():
    """Each device has whole rows, and nothing is offloaded on several; masters are no coarser than what is
    published."""
    full = {"master": "float32", "first_moment": "float32", "second_moment": "float32"}
    several = config(train={"fsdp": 2, "rows_per_microbatch": 6, "remat": "none"}, optim=full)
    float32 = config(precision={"recipe": "bf16", "weight_dtype": "float32", "compute_dtype": "float32"},
                     optim=full)
    need = lambda changed: needs(changed, MODEL, H200)["an update"]
    advised = [[knob for _, knob in _savings(check(cfg), need, False)] for cfg in (several, float32)]
    assert [[knob.partition(" = ")[0] for knob in knobs] for knobs in advised] == [
        ["optim.master", "train.remat", "train.rows_per_microbatch", "train.fsdp"],
        ["optim.offload", "train.fsdp"],
    ]
    assert advised[0][2:] == ["train.rows_per_microbatch = 4",
                              "train.fsdp = 4, train.rows_per_microbatch = 8"]


def test_what_the_utilisation_leaves_to_the_engine_counts():
    cfg = config(rollout={"kv_cache_gib": None, "gpu_memory_utilization": 0.9, "sleep": "off"})
    with pytest.raises(ConfigError, match="rollout.sleep = \"drop_weights\""):
        check_fits(cfg, MODEL, H200)
    check_fits(config(rollout={"engine": "remote", "kv_cache_gib": None}), MODEL, H200)


@pytest.fixture
def saved(tmp_path):
    """A run directory with a checkpoint in it."""
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    (tmp_path / "checkpoints" / "2" / DIGESTS).touch()
    return {"dir": str(tmp_path)}


def test_memory_that_runs_out_is_explained_by_phase(saved):
    clock = Clock()
    with pytest.raises(OutOfMemory) as caught, explained(config(run=saved)), clock("update"):
        error = jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 58 bytes.")
        error.add_note("JAX has removed its internal frames")  # as it says of what leaves a jitted function
        raise error
    said = str(caught.value)
    assert "(phase: update)" in said and "for a rollout" in said and "largest savings: " in said
    with pytest.raises(jax.errors.JaxRuntimeError), explained(config()):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")


def test_what_to_change_and_the_way_on_are_those_of_a_run_that_has_saved_something_or_nothing(
        saved, tmp_path):
    full = {"master": "float32", "first_moment": "float32", "second_moment": "float32"}

    def said(run):
        with pytest.raises(OutOfMemory) as caught, explained(config(run=run, optim=full)):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")
        return str(caught.value)

    going_on, anew = said(saved), said({"dir": str(tmp_path / "new")})
    assert "optim.offload = true" in going_on and going_on.endswith("; then --resume")
    assert "optim.master" not in going_on, "a run does not go on with it"
    assert 'optim.master = "bfloat16"' in anew
    assert anew.endswith("; then start again: nothing has been saved yet")
