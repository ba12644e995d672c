"""Adapter folders of PEFT: written, read, and refused with all that differs."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.errors import ModelError
from jaxfp8rl.models.peft import (
    CONFIG,
    KNOWN,
    PREFIX,
    REFUSED,
    WEIGHTS,
    check_adapter,
    read_adapter,
    write_adapter,
)
from jaxfp8rl.policy.warnings import base_warning

SHAPES = {f"model.layers.{i}.self_attn.q_proj.{which}.weight": shape for i in range(2)
          for which, shape in (("lora_A", (2, 6)), ("lora_B", (4, 2)))}
TENSORS = {name: np.random.default_rng(i).standard_normal(shape, np.float32)
           for i, (name, shape) in enumerate(SHAPES.items())}
HOW = {"rank": 2, "alpha": 7.0, "rslora": False}


@pytest.fixture
def folder(tmp_path):
    write_adapter(tmp_path / "adapter", TENSORS, targets=("q_proj",), base="models/base", digest="abc", **HOW)
    return tmp_path / "adapter"


def changed(folder, **settings):
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | settings))
    return folder


def test_what_was_written_is_read(folder):
    tensors, digest = read_adapter(folder, SHAPES, **HOW)
    assert digest == "abc" and set(tensors) == set(TENSORS)
    assert all(np.array_equal(tensors[name], x) for name, x in TENSORS.items())
    assert {p.name for p in folder.iterdir()} == {CONFIG, WEIGHTS}


@pytest.mark.parametrize("key, value", [
    ("use_dora", True), ("modules_to_save", ["lm_head"]), ("bias", "all"), ("rank_pattern", {"q_proj": 4}),
    ("alora_invocation_tokens", [5, 6]), ("use_bdlora", {"nblocks": 2}), ("kasa_config", {"beta": 1e-4}),
    ("layers_to_transform", [0]), ("init_lora_weights", "pissa_niter_16"), ("lora_alpha", "7"),
])
def test_what_no_adapter_here_has_is_refused_by_name(folder, key, value):
    assert key in REFUSED or key in ("init_lora_weights", "lora_alpha")
    with pytest.raises(ModelError, match=key):
        read_adapter(changed(folder, **{key: value}), SHAPES, **HOW)


def test_a_setting_of_a_later_peft_is_refused_unless_it_is_off(folder):
    read_adapter(changed(folder, use_better_lora=False, better_config=None), SHAPES, **HOW)
    with pytest.raises(ModelError, match="better_config = .*not known here"):
        read_adapter(changed(folder, better_config={"x": 1}), SHAPES, **HOW)


def test_every_setting_of_peft_is_known_and_its_defaults_are_taken(folder):
    peft = pytest.importorskip("peft")
    assert {f.name for f in dataclasses.fields(peft.LoraConfig)} <= KNOWN | REFUSED.keys()
    peft.LoraConfig(r=2, lora_alpha=7, target_modules=["q_proj"]).save_pretrained(folder)
    read_adapter(folder, SHAPES, **HOW)


def test_all_that_differs_is_listed(folder):
    tensors = {PREFIX + name: x for name, x in TENSORS.items()}
    first, second, *_ = TENSORS
    del tensors[PREFIX + first]
    tensors[PREFIX + second] = np.zeros((5, 2), np.float32)
    tensors[PREFIX + "model.layers.2.mlp.up_proj.lora_A.weight"] = np.zeros((2, 6), np.float32)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ModelError) as e:
        read_adapter(changed(folder, r=4, lora_alpha=8, use_rslora=True), SHAPES, **HOW)
    for said in ("r is 4, expected 2", "lora_alpha is 8, expected 7.0", "use_rslora is True, expected False",
                 f"{first} is missing", f"{second} is [5, 2], expected [4, 2]",
                 "model.layers.2.mlp.up_proj.lora_A.weight has no place here", "set lora.rank"):
        assert said in str(e.value)


@pytest.mark.parametrize("gone", [CONFIG, WEIGHTS])
def test_a_folder_that_is_none_is_named(folder, gone):
    (folder / gone).unlink()
    with pytest.raises(ModelError, match="is no adapter folder of PEFT"):
        read_adapter(folder, SHAPES, **HOW)


def test_numbers_that_are_no_adapter_s_are_refused(folder):
    """Of another type, under another name, or not finite: the last is not in the headers that a check
    reads."""
    first, second, *_ = TENSORS
    tensors = {PREFIX + name: x for name, x in TENSORS.items()}
    save_file(tensors | {PREFIX + first: np.zeros(SHAPES[first], np.int8), second: TENSORS[second]},
              folder / WEIGHTS)
    with pytest.raises(ModelError) as e:
        check_adapter(folder, SHAPES, **HOW)
    assert f"{first} is I8, expected one of F32" in str(e.value)
    assert f"{second} does not begin with {PREFIX}" in str(e.value)
    save_file(tensors | {PREFIX + first: np.full(SHAPES[first], np.nan, np.float32)}, folder / WEIGHTS)
    check_adapter(folder, SHAPES, **HOW)
    with pytest.raises(ModelError, match=f"{first} has numbers that are not finite"):
        read_adapter(folder, SHAPES, **HOW)


def test_a_config_that_is_no_table_is_named(folder):
    (folder / CONFIG).write_text("[1]")
    with pytest.raises(ModelError, match="holds no JSON object"):
        read_adapter(folder, SHAPES, **HOW)


def test_a_base_by_another_name_is_told_where_no_digest_tells(folder, tmp_path):
    def said(path: str) -> str | None:
        words = ["--sft.steps", "0", "--lora.rank", "2", "--lora.path", str(folder), "--model.path", path]
        return base_warning(load_config("demo", [*words, "--model.config", "{}"]))

    assert said("models/other") is None  # the digest tells
    save_file({PREFIX + name: x for name, x in TENSORS.items()}, folder / WEIGHTS)
    assert said("/here/Base") is None
    assert 'was trained over "models/base", and model.path is "models/other"' in (said("models/other") or "")
