"""Folders in four bits: what `export` and `quantize` write is what compressed-tensors and vLLM read."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import written_folder
from four_bits_folder import MODEL, decoded, write_base

from jaxfp8rl.checkpoint.export import quantize_folder
from jaxfp8rl.cli.main import main
from jaxfp8rl.data.random_tokenizer import random_tokenizer
from jaxfp8rl.errors import ModelError
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import get_param, is_packed, param_table
from jaxfp8rl.models.loading import load_params, save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.packed_config import FORMS, Packed
from jaxfp8rl.policy.adapters import digest_of

pytestmark = pytest.mark.usefixtures("quick_compile")
@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = write_base(tmp_path_factory.mktemp("four") / "base")
    random_tokenizer(MODEL.vocab_size, 4).save(str(folder))
    return folder


@pytest.fixture(scope="module")
def folders(base) -> dict[str, Path]:
    return {form: quantize_folder(base, base.parent / form, form) for form in FORMS}


@pytest.mark.parametrize("form", FORMS)
def test_everything_else_is_the_bf16_folders(form, base, folders):
    written, (_, params) = written_folder.tensors(folders[form]), load_params(base)
    packed = dataclasses.replace(MODEL, packed=ModelConfig.from_hf(folders[form]).packed)
    assert packed.packed is not None and packed.packed.form == form
    for e in param_table(packed):
        if not is_packed(e, packed):
            np.testing.assert_array_equal(written[e.hf_name].astype(np.float32), get_param(params, e))
        else:
            error = decoded(folders[form])[e.hf_name] - get_param(params, e)
            assert 0.06 < np.linalg.norm(error) / np.linalg.norm(get_param(params, e)) < 0.14, e.hf_name
    assert (folders[form] / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("form", FORMS)
def test_quantised_when_loaded_it_is_the_folder_of_quantize(form, base, folders):
    """Of `lora.base`: every array has the bits of the packed folder's."""
    _, want = load_params(folders[form], dtype="stored")
    asked = dataclasses.replace(ModelConfig.from_hf(base), packed=Packed(form, stored=False))
    cfg, found = load_params(base, asked, dtype="stored")
    assert cfg == asked and digest_of(found) == digest_of(want)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want)):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


def test_parts_of_a_product_share_a_global_scale(folders):
    scales = {name: float(x[0]) for name, x in written_folder.tensors(folders["nvfp4"]).items()
              if name.endswith("_global_scale")}
    of = lambda part: {scales[f"model.layers.0.{part}.{name}_proj.weight_global_scale"]
                       for name in (("q", "k", "v") if part == "self_attn" else ("gate", "up"))}
    assert len(of("self_attn")) == len(of("mlp")) == 1
    assert scales["model.layers.0.self_attn.o_proj.weight_global_scale"] not in of("self_attn")  # k is larger


def test_the_command_and_what_it_refuses(base, folders, tmp_path, capsys):
    again = tmp_path / "again"
    assert main(["quantize", str(base), str(again), "--format", "int4"]) == 0
    for file in folders["int4"].iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    assert main(["quantize", str(again), str(tmp_path / "b")]) == 2
    assert "is in int4 already\n  next step: start from the BF16" in capsys.readouterr().err
    assert main(["quantize", str(base), str(again)]) == 2 and "not empty" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "none"), str(tmp_path / "b")]) == 2
    said = capsys.readouterr().err
    assert "jaxfp8rl: no model config at" in said and said.endswith("or name another folder\n"), said
    odd = tmp_path / "odd"
    save_params(odd, narrow := dataclasses.replace(MODEL, intermediate_size=176),
                init_params(narrow, jax.random.key(0)))
    with pytest.raises(ModelError, match=r"groups of 32 along K, which do not divide mlp.down_proj "
                                         r"\[128, 176\]\n.*nvfp4"):
        quantize_folder(odd, tmp_path / "c", "mxfp4")
    broken, (_, params) = tmp_path / "broken", load_params(base)
    params["layers"]["mlp"]["up_proj"]["weight"][1, 3, 4] = np.inf
    save_params(broken, MODEL, params)
    with pytest.raises(ModelError, match="model.layers.1.mlp.up_proj.weight has numbers that are not finite"):
        quantize_folder(broken, tmp_path / "d", "nvfp4")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again", "broken", "odd"]


SCHEME = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def edited(folder: Path, tmp_path: Path, edit) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    edit(config["quantization_config"], config["quantization_config"]["config_groups"]["group_0"])
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.mark.parametrize(("edit", "says"), [
    (lambda c, g: g["weights"].update(num_bits=8, type="int", strategy="channel", group_size=None),
     "weights of num_bits 8, type int, strategy channel, group_size None"),
    (lambda c, g: g.update(input_activations=SCHEME), "input_activations"),
    (lambda c, g: g["weights"].update(symmetric=False), "zero points"),
    (lambda c, g: g["weights"].update(actorder="group"), "actorder = 'group'"),
    (lambda c, g: c["config_groups"].update(group_1=g), "2 config_groups"),
    (lambda c, g: g.update(targets=["re:.*mlp.*"]), "targets"),
    (lambda c, g: c.update(ignore=[]), "an lm_head in four bits"),
    (lambda c, g: c["ignore"].append("model.layers.1.mlp.up_proj"),
     "up_proj of 1 of 2 layers in high precision"),
    (lambda c, g: c["ignore"].append("re:.*_proj"), "no linear of the layers"),
    (lambda c, g: g.update(format="dense"), 'format "dense" of nvfp4'),
    (lambda c, g: c.update(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
    (lambda c, g: c.update(config_groups={"group_0": "W4A16"}), "the config group 'W4A16'"),
    (lambda c, g: c.update(ignore="lm_head"), "ignore = 'lm_head', which is no list of names"),
    (lambda c, g: c["ignore"].append("re:("), "a pattern in `ignore` that cannot be read"),
])
def test_other_schemes_are_refused_by_name(edit, says, folders, tmp_path):
    with pytest.raises(ModelError) as e:
        ModelConfig.from_hf(edited(folders["nvfp4"], tmp_path, edit))
    for part in (says, "nvfp4-pack-quantized", "jaxfp8rl quantize"):
        assert part in str(e.value)


def test_what_other_tools_write_is_read(folders, tmp_path):
    """llm-compressor names no format in the group, and ignores by patterns."""
    def edit(c, g):
        g.pop("format")
        c["ignore"] = ["re:.*lm_head", "re:.*self_attn.o_proj$"]

    packed = ModelConfig.from_hf(edited(folders["nvfp4"], tmp_path, edit)).packed
    assert packed is not None and "self_attn.o_proj" not in packed.linears and len(packed.linears) == 6
