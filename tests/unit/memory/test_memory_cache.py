"""The size of a cache that is "auto": what has room beside the learner, and no more than is of use."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.common import config as shape
from jaxfp8rl.checkpoint.read_only import Trained
from jaxfp8rl.config.resume_rules import check_typed, settled
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import dump_config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.evaluate import pass_at_k
from jaxfp8rl.memory import cache, fit
from jaxfp8rl.memory.cache import (
    GIB,
    chosen_gib,
    format_cache,
    held_at_once,
    room_for_cache,
    with_cache,
)
from jaxfp8rl.memory.cache_bytes import (
    cache_of,
    embedded_cache,
    least_gib,
    sequence_bytes,
    wanted_at_once,
)
from jaxfp8rl.memory.fit import check_fits, format_needs, needs
from jaxfp8rl.memory.plan import left_free
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.policy.shapes import model_config
from jaxfp8rl.rollout.vllm_options import cache_bytes
from jaxfp8rl.training import loop, start

H100, H200 = int(79.2 * GIB), 150_754_820_096  # bytes, by the driver
SMALL, LARGE = (ModelConfig.from_hf(shape(*size)) for size in (("0.6b", 3), ("8b",)))
LOW = {"master": "bfloat16", "first_moment": "float8", "second_moment": "bfloat16"}


def config(*size, **sections) -> Config:
    base = {
        "run": {"dir": "runs/x", "steps": 1},
        "model": {"config": shape(*(size or ("8b",))), "tokenizer": "chars:01"},
        "task": {"kind": "arithmetic", "max_prompt_tokens": 32},
        "rollout": {"engine": "vllm", "prompts_per_step": 8, "samples_per_prompt": 8, "max_new_tokens": 4096,
                    "kv_cache": "fp8", "kv_cache_gib": "auto", "sleep": "drop_weights"},
        "precision": {"recipe": "fp8_unified"},
        "train": {"row_tokens": 32768, "rows_per_microbatch": 1, "remat": "layer"},
        "optim": LOW,
    }
    return Config.model_validate({name: {**base.get(name, {}), **sections.get(name, {})} for name in base
                                  | sections})


@st.composite
def runs(draw) -> Config:
    fsdp, length = draw(st.sampled_from([1, 2])), draw(st.integers(100, 30_000))
    rollout = {
        "max_new_tokens": length, "max_num_seqs": draw(st.integers(1, 300)),
        "prompts_per_step": draw(st.integers(1, 64)), "kv_cache": draw(st.sampled_from(["auto", "fp8"])),
        "sleep": draw(st.sampled_from(["off", "keep_weights", "drop_weights"])),
    }
    return config("0.6b", 3, rollout=rollout, train={"fsdp": fsdp, "rows_per_microbatch": fsdp},
                  sft={"steps": draw(st.sampled_from([0, 1]))})


@settings(max_examples=60, deadline=None)
@given(runs(), st.integers(2 * GIB, 100 * GIB), st.integers(0, 60 * GIB))
def test_laws_of_an_automatic_cache(cfg, total, more):
    """It has room; it is the largest that has, in tenths of a GiB; no more than is of use; and no smaller on
    a larger card. There is none exactly where the run is refused."""
    size, larger = chosen_gib(cfg, SMALL, total), chosen_gib(cfg, SMALL, total + more)
    if size is None:
        with pytest.raises(ConfigError, match=" needs "):
            check_fits(cfg, SMALL, total)
        return
    check_fits(cfg, SMALL, total)
    check_fits(cfg.having("rollout", kv_cache_gib=size), SMALL, total)
    room, most = room_for_cache(cfg, SMALL, total), cache_of(cfg, SMALL, wanted_at_once(cfg))
    assert least_gib(cfg, SMALL) * GIB <= size * GIB <= room - left_free(cfg, SMALL)
    assert (size - 0.1) * GIB < most
    assert (size + 0.1) * GIB > room - left_free(cfg, SMALL) or size * GIB >= most
    assert held_at_once(cfg, SMALL, int(size * GIB)) >= 1
    assert larger is not None and larger >= size


def test_a_cache_as_large_as_its_room_fits_and_a_larger_one_does_not():
    room = room_for_cache(config(), LARGE, H200) / GIB
    check_fits(config(rollout={"kv_cache_gib": room - 0.1}), LARGE, H200)
    with pytest.raises(ConfigError, match="needs"):
        check_fits(config(rollout={"kv_cache_gib": room + 0.1}), LARGE, H200)
    assert room_for_cache(config(rollout={"sleep": "off"}), LARGE, H200) < room * GIB
    assert room_for_cache(config(), LARGE, GIB) < 0


def test_as_many_sequences_decode_at_once_as_the_cache_the_step_and_the_setting_hold():
    """8B: 36 layers, 8 heads of 128 for keys and values, a byte each in FP8; 64 completions a step. 4,128
    tokens are 65 pages of 64; one more page is vLLM's own."""
    cfg = config()
    token = 2 * 36 * 8 * 128
    assert sequence_bytes(cfg, LARGE, 2) == token * 4128
    assert sequence_bytes(config(rollout={"kv_cache": "auto"}), LARGE, 2) == 2 * token * 4128
    assert cache_of(cfg, LARGE, 3) == (3 * 65 + 1) * 64 * token
    holds = lambda n: held_at_once(cfg, LARGE, cache_of(cfg, LARGE, n))
    assert [holds(n) for n in (0, 5, 63, 64, 65)] == [0, 5, 63, 64, 64]
    assert held_at_once(cfg, LARGE, cache_of(cfg, LARGE, 5) - 1) == 4 and held_at_once(cfg, LARGE, 0) == 0
    assert held_at_once(config(rollout={"max_num_seqs": 7}), LARGE, cache_of(cfg, LARGE, 20)) == 7


def test_what_does_not_fit_with_one_sequence_is_refused_with_what_helps():
    cfg = config(train={"remat": "none"})
    with pytest.raises(ConfigError, match="^an update needs ") as caught:
        check_fits(cfg, LARGE, H200)
    assert 'train.remat = "mlp"' in str(caught.value) and "kv_cache_gib" not in str(caught.value)
    least = needs(cfg, LARGE, H200)["a rollout"] - needs(cfg.having("rollout", kv_cache_gib=0.0), LARGE,
                                                         H200)["a rollout"]
    assert least == int(least_gib(cfg, LARGE) * GIB) + left_free(cfg, LARGE)
    assert chosen_gib(cfg, LARGE, H200) is None and format_needs(cfg, LARGE) == ""


JAX = {"engine": "jax", "sleep": "off"}


@settings(max_examples=40, deadline=None)
@given(runs(), st.integers(2 * GIB, 100 * GIB), st.integers(0, 60 * GIB))
def test_laws_of_an_embedded_engines_automatic_cache(cfg, total, more):
    """As above. Where all sequences fit it is the cache that the engine has without a size."""
    cfg = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update=JAX)})
    cfg = cfg.having("train", fsdp=1, rows_per_microbatch=1)
    size, larger = chosen_gib(cfg, SMALL, total), chosen_gib(cfg, SMALL, total + more)
    if size is None:
        with pytest.raises(ConfigError, match=" needs |a sequence"):
            check_fits(cfg, SMALL, total - 2**30 // 10)  # sizes are in tenths of a GiB
        return
    check_fits(cfg.having("rollout", kv_cache_gib=size), SMALL, total)
    assert least_gib(cfg, SMALL) <= size <= larger
    whole = embedded_cache(cfg.having("rollout", kv_cache_gib=None), SMALL)
    held = held_at_once(cfg, SMALL, int(size * GIB))
    if embedded_cache(cfg.having("rollout", kv_cache_gib=size), SMALL) == whole:
        assert held == wanted_at_once(cfg)
    else:
        with pytest.raises(ConfigError, match=" needs "):
            check_fits(cfg.having("rollout", kv_cache_gib=size + 0.2), SMALL, total)


def test_an_embedded_engines_cache_is_chosen_for_the_gpu_and_said(monkeypatch):
    monkeypatch.setattr(cache, "memory_of_jax", lambda: 60 * GIB)
    cfg, said = with_cache(config("0.6b", 3, rollout={**JAX, "max_new_tokens": 30_000}))
    assert cfg.rollout.kv_cache_gib == chosen_gib(
        config("0.6b", 3, rollout={**JAX, "max_new_tokens": 30_000}), model_config(cfg), 60 * GIB)
    assert said.startswith(f'rollout.kv_cache_gib = "auto": {cfg.rollout.kv_cache_gib:g} GiB, which holds ')
    assert with_cache(cfg) == (cfg, "")
    few = config("0.6b", 3, rollout={**JAX, "max_new_tokens": 30_000, "max_num_seqs": 256})
    hardly = sum(needs(few, model_config(few), 0).values()) + GIB
    monkeypatch.setattr(cache, "memory_of_jax", lambda: hardly)
    assert "or the engine computes some again" in with_cache(few)[1]
    said = format_cache(few, model_config(few), {"one": 60 * GIB})
    assert said.startswith("the engine's cache: ") and 'one: kv_cache_gib = "auto" is ' in said


def test_an_embedded_engine_without_a_gpu_is_refused_a_cache_by_its_memory():
    with pytest.raises(ConfigError, match="there is none") as caught:
        with_cache(config(rollout=JAX))
    assert "GiB or more, or leave it out" in str(caught.value)


# At the start of a run


@pytest.fixture
def h200(monkeypatch):
    monkeypatch.setattr(cache, "device_memory", lambda: H200)
    monkeypatch.setattr(fit, "device_memory", lambda: H200)
    monkeypatch.setattr(fit, "share_gpu", lambda cfg: None)


LONG = {"max_new_tokens": 20_480}


def test_the_size_is_chosen_for_the_gpu_and_said(h200):
    cfg, said = with_cache(config())
    assert cfg == config(rollout={"kv_cache_gib": chosen_gib(config(), LARGE, H200)})
    assert said == (f'rollout.kv_cache_gib = "auto": {cfg.rollout.kv_cache_gib} GiB, which holds 64 of the '
                    "64 sequences of full length that decode at once")
    assert cache_bytes(cfg.rollout.kv_cache_gib) >= cache_of(cfg, LARGE, 64)


def test_fewer_sequences_than_asked_for_are_said_with_the_setting(h200):
    cfg, said = with_cache(config(rollout=LONG))
    held = held_at_once(cfg, LARGE, cache_bytes(cfg.rollout.kv_cache_gib))
    assert 30 < held < 64 and cfg.rollout.max_num_seqs == 256
    assert f"holds {held} of the 64" in said and f"set rollout.max_num_seqs = {held}, or" in said
    own, said = with_cache(config(rollout={"kv_cache_gib": 4.0}))
    assert own.rollout.kv_cache_gib == 4.0 and said.startswith("rollout.kv_cache_gib = 4 holds 13 of the 64")


@pytest.mark.parametrize("rollout", [
    {"kv_cache_gib": 30.0}, {"kv_cache_gib": None}, {"engine": "jax", "kv_cache_gib": None, "sleep": "off"},
    {"engine": "served", "kv_cache_gib": 4.0},
])
def test_nothing_else_is_chosen_or_said(h200, rollout):
    cfg = config(rollout=rollout)
    assert with_cache(cfg) == (cfg, "")


def test_without_a_gpu_it_is_refused():
    with pytest.raises(ConfigError, match="there is none") as caught:
        with_cache(config())
    assert "give the size, 0.3 GiB or more, or leave it out" in str(caught.value)
    with pytest.raises(ConfigError, match="not been chosen"):
        cache_bytes("auto")


def test_a_gpu_without_room_is_refused(monkeypatch):
    monkeypatch.setattr(cache, "device_memory", lambda: 20 * GIB)
    with pytest.raises(ConfigError, match="a sequence of full length takes 0.3 GiB"):
        with_cache(config(), fresh=False)


def test_the_first_process_chooses_for_all(h200):
    cfg, said = with_cache(config(), for_all=lambda choose: choose() / 2)
    assert cfg.rollout.kv_cache_gib == chosen_gib(config(), LARGE, H200) / 2 and "holds 3" in said


class Stopped(Exception):
    """A run or an evaluation has come to its engine."""


def stopped(seen: list) -> object:
    def build_run(cfg, *rest, **options):
        seen.append(cfg)
        raise Stopped

    return build_run


def test_a_run_starts_its_engine_with_it_and_notes_it(h200, tmp_path, monkeypatch):
    monkeypatch.setattr(start, "build_run", stopped(seen := []))
    with pytest.raises(Stopped):
        loop.train(config(run={"dir": str(tmp_path / "run")}))
    size = chosen_gib(config(), LARGE, H200)
    assert [cfg.rollout.kv_cache_gib for cfg in seen] == [size]
    notes = Path(tmp_path, "run", "notes.txt").read_text()
    assert f'rollout.kv_cache_gib = "auto": {size} GiB' in notes


def test_an_evaluation_of_a_config_chooses_it_too(h200, monkeypatch, capsys):
    monkeypatch.setattr(pass_at_k, "build_run", stopped(seen := []))
    monkeypatch.setattr(pass_at_k, "config_of", lambda *_: config())
    monkeypatch.setattr(pass_at_k, "read_trained", lambda cfg, *_: Trained(cfg, LARGE, {}, {}, 0))
    with pytest.raises(Stopped):
        pass_at_k.run_eval("a_config")
    assert seen[0].rollout.kv_cache_gib == chosen_gib(config(), LARGE, H200)
    assert 'kv_cache_gib = "auto"' in capsys.readouterr().out


def test_a_resumed_run_keeps_the_size_that_it_began_with(tmp_path):
    asked, of = config(run={"dir": str(tmp_path)}), tmp_path / "config.toml"
    assert settled(asked) == asked == settled(asked, resume=True), "no run was begun there"
    of.write_text(dump_config(asked.having("rollout", kv_cache_gib=7.3)))
    assert settled(asked, resume=True).rollout.kv_cache_gib == 7.3 and settled(asked) == asked
    check_typed(settled(asked, resume=True), [])
    given_ = asked.having("rollout", kv_cache_gib=5.0)
    assert settled(given_, resume=True) == given_
    of.write_text(dump_config(asked.having("rollout", kv_cache_gib=None)))
    assert settled(asked, resume=True) == asked


def test_a_dry_run_says_what_the_cache_holds_and_what_each_card_would_choose():
    cards = {"one": H200, "tiny": GIB}
    small = format_cache(config(rollout={"kv_cache_gib": 4.0}), LARGE, cards)
    assert "kv_cache_gib = 4 holds 13 of the 64" in small and "max_num_seqs = 13" in small
    size = chosen_gib(config(), LARGE, H200)
    assert f'one: kv_cache_gib = "auto" is {size}, which holds 64 of the 64' in small
    assert 'tiny: kv_cache_gib = "auto" has no room for one' in small
    assert format_cache(config(), LARGE, cards).count("holds") == 1
    assert format_cache(config(rollout={"engine": "jax", "kv_cache_gib": None}), LARGE, cards) == ""
