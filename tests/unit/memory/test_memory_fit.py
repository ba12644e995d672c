"""A run that cannot fit is refused before anything loads, and the error names the settings that save most."""

from __future__ import annotations

import re

import pytest
from eight_b import FULL, H200, MODEL, config

from jaxfp8rl.config.resume_rules import changes
from jaxfp8rl.config.rules import check
from jaxfp8rl.config.schema import Config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.memory.advice import advice, options, valid
from jaxfp8rl.memory.fit import (
    ENGINE_REST,
    WARM,
    check_fits,
    check_warm_start,
    format_needs,
    needs,
)
from jaxfp8rl.memory.plan import memory_plan, warm_start_plan


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
    alone = "^the warm start needs (?s:.*)\n  or run the warm start by itself: jaxfp8rl sft"
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


def advised(cfg: Config, total: int) -> tuple[str, list[str], list[float], list[float]]:
    """(the next step of a refusal, its settings, what each saves in GiB, what each leaves to spare)."""
    with pytest.raises(ConfigError) as caught:
        check_fits(cfg, MODEL, total)
    said = caught.value.next_step
    settings = re.findall(r"^    (\S.*?)  \(", said, re.MULTILINE)
    return said, settings, *([float(x) for x in re.findall(rf"([\d.]+) {what}", said)]
                             for what in ("GiB less", "to spare"))


def test_what_is_said_to_help_helps_by_as_much():
    cfg = config(optim={"offload": False}, train={"remat": "mlp"})
    most = lambda c: max(needs(c, MODEL, H200).values())
    total = most(cfg) - 2**30
    said, settings, saved, spare = advised(cfg, total)
    assert said.startswith("each of these makes it fit, the cheapest first:")
    assert settings == ["train.row_tokens = 8256", 'train.remat = "layer"',
                        'optim.gradient_sums = "bfloat16"', "optim.offload = true"]
    alone = [config(train={"remat": "mlp", "row_tokens": 8256}), config(),
             *(config(train={"remat": "mlp"}, optim=optim)
               for optim in ({"offload": False, "gradient_sums": "bfloat16"}, {"offload": True}))]
    for changed, less, left in zip(alone, saved, spare):
        assert less == pytest.approx((most(cfg) - most(changed)) / 2**30, abs=0.06)
        assert left == pytest.approx(less - 1.0, abs=0.11)
        check_fits(changed, MODEL, total)


def test_what_fits_together_alone_is_said_with_none_too_many():
    cfg = config(optim=FULL, train={"remat": "none"})
    said, settings, saved, _ = advised(cfg, H200)
    assert said.startswith("these make it fit together, with 14.5 GiB to spare:")
    assert settings == ['train.remat = "mlp"',
                        'optim.first_moment = "float8", optim.second_moment = "bfloat16"']
    low = {"first_moment": "float8", "second_moment": "bfloat16"}
    both = config(optim=FULL | low, train={"remat": "mlp"})
    check_fits(both, MODEL, H200)
    for one in (config(optim=both.optim.model_dump(), train={"remat": "none"}),
                config(optim=FULL, train={"remat": "mlp"})):
        with pytest.raises(ConfigError):
            check_fits(one, MODEL, H200)
    before, after = (max(needs(c, MODEL, H200).values()) for c in (cfg, both))
    assert sum(saved) == pytest.approx((before - after) / 2**30, abs=0.11)


def test_a_smaller_model_is_the_last_resort():
    said, settings, *_ = advised(config(), 30 * 2**30)
    assert said.startswith("a smaller model, or more GPUs: with all of these it is ")
    assert "optim.offload = true" in settings
    assert advice(config(), lambda changed: 5, 1) == "a smaller model: no setting of this config saves memory"


@pytest.mark.parametrize("engine, names", [
    ("vllm", {"rollout.kv_cache_gib", "rollout.max_new_tokens"}),
    ("jax", {"rollout.max_num_seqs", "rollout.max_new_tokens"}),
])
def test_every_kind_of_setting_is_tried_and_changes_something(engine, names):
    cfg = config(optim=FULL, rollout={"engine": engine}, train={"remat": "none", "rows_per_microbatch": 2})
    tried = [str(change) for change in options(cfg)]
    named = {setting.partition(" = ")[0] for change in tried for setting in change.split(", ")}
    assert named >= names | {"train.rows_per_microbatch", "train.row_tokens", "train.remat", "train.fsdp",
                             "optim.first_moment", "optim.master", "optim.offload"}
    assert tried[-1].startswith("rollout.max_new_tokens = 2048") and len(set(tried)) == len(tried)
    assert all(changes(cfg, change.of(cfg)) for change in options(cfg))


def test_no_change_is_advised_that_would_be_refused():
    """Each device has whole rows, and nothing is offloaded on several; masters are no coarser than what is
    published."""
    several = config(train={"fsdp": 2, "rows_per_microbatch": 6, "remat": "none"}, optim=FULL)
    float32 = config(precision={"recipe": "bf16", "weight_dtype": "float32", "compute_dtype": "float32"},
                     optim=FULL)
    tried = [[str(change) for change, _ in valid(check(cfg))] for cfg in (several, float32)]
    assert not any("offload" in change for change in tried[0]) and "optim.offload = true" in tried[1]
    assert any("optim.master" in change for change in tried[0])
    assert not any("optim.master" in change for change in tried[1])
    assert {"train.rows_per_microbatch = 4", "train.fsdp = 4, train.rows_per_microbatch = 8"} <= {*tried[0]}


def test_what_the_utilisation_leaves_to_the_engine_counts():
    cfg = config(rollout={"kv_cache_gib": None, "gpu_memory_utilization": 0.9, "sleep": "off"})
    with pytest.raises(ConfigError, match="rollout.sleep = \"drop_weights\""):
        check_fits(cfg, MODEL, H200)
    check_fits(config(rollout={"engine": "served", "kv_cache_gib": None}), MODEL, H200)
