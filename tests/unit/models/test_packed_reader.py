"""The reader of checkpoints in four bits: codes stay as they are stored, and what an engine would read
differently is refused."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import written_folder
from four_bits_folder import MODEL, decoded, write_base
from safetensors.numpy import save_file

from jaxfp8rl.checkpoint.export import quantize_folder
from jaxfp8rl.errors import ModelError
from jaxfp8rl.models.hf_names import get_param, is_packed, param_table
from jaxfp8rl.models.known import known_shape
from jaxfp8rl.models.loading import check_weights, load_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.packed import unpack_params
from jaxfp8rl.models.packed_config import FORMS
from pallas_kernels import four_bits

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    base = write_base(tmp_path_factory.mktemp("four") / "base")
    return {form: quantize_folder(base, base.parent / form, form) for form in FORMS}


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_is_read_as_it_is_stored(form, folders):
    cfg, params = load_params(folders[form], dtype="stored")
    values = decoded(folders[form])
    assert cfg.packed is not None and cfg.packed.form == form
    for e in param_table(cfg):
        found = get_param(params, e)
        if is_packed(e, cfg):
            assert isinstance(found, four_bits.FourBits) and found.format == form
            np.testing.assert_array_equal(four_bits.values(found), values[e.hf_name])
        else:
            assert found.dtype == "bfloat16"
    like = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))  # the shapes of a random one
    shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
    assert shapes(like) == shapes(params)
    assert cfg.from_hf(cfg.to_hf()) == cfg
    whole = unpack_params(params)["layers"]["mlp"]["up_proj"]["weight"]
    np.testing.assert_array_equal(whole[1], values["model.layers.1.mlp.up_proj.weight"])


def changed(folder: Path, to: Path, **edits) -> Path:
    """The folder as a file, with tensors replaced, or left out for None."""
    tensors = {k: v for k, v in (written_folder.tensors(folder) | edits.pop("tensors", {})).items()
               if v is not None}
    to.mkdir()
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


Q, UP = "model.layers.1.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"


def test_unequal_global_scales_are_refused_with_the_tensors_listed(folders, tmp_path):
    theirs = changed(folders["nvfp4"], tmp_path / "a", tensors={f"{Q}_global_scale": np.float32([3.0])})
    with pytest.raises(ModelError) as e:
        check_weights(theirs)
    said = str(e.value)
    assert f"{Q}_global_scale = 3" in said and "layers.1.self_attn.k_proj.weight_global_scale = " in said
    assert "layers.0" not in said and "o_proj" not in said and "jaxfp8rl quantize" in said


@pytest.mark.parametrize(("form", "tensors", "says"), [
    ("nvfp4", {f"{Q}_packed": None}, "1 of 53 tensors are missing: .*q_proj.weight_packed"),
    ("nvfp4", {f"{UP}_global_scale": np.float32([np.nan])}, "which is no divisor"),
    ("nvfp4", {f"{UP}_scale": np.ones((192, 8), np.float32)}, r"is F32 \[192, 8\], config.json says F8_E4M3"),
    ("mxfp4", {f"{UP}_packed": np.ones((192, 32), np.uint8)},
     r"is U8 \[192, 32\], config.json says U8 \[192, 64\]"),
    ("int4", {UP: np.ones((192, 128), np.float32)}, "unknown tensor .*up_proj.weight"),
])
def test_what_does_not_belong_is_refused(form, tensors, says, folders, tmp_path):
    with pytest.raises(ModelError, match=says):
        check_weights(changed(folders[form], tmp_path / "a", tensors=tensors))


def test_scales_that_no_engine_reads_are_refused(folders, tmp_path):
    scale = written_folder.tensors(folders["nvfp4"])[f"{UP}_scale"].copy()
    scale[0, 3] = -scale[0, 3]
    odd = changed(folders["nvfp4"], tmp_path / "a", tensors={f"{UP}_scale": scale})
    with pytest.raises(ModelError, match=f"{UP}_scale has scales that are negative"):
        load_params(odd)
    scale = np.full_like(written_folder.tensors(folders["mxfp4"])[f"{UP}_scale"], 255)
    with pytest.raises(ModelError, match="not finite"):
        load_params(changed(folders["mxfp4"], tmp_path / "b", tensors={f"{UP}_scale": scale}))


def test_a_scalar_divisor_is_as_good_and_a_shape_is_not_needed(folders, tmp_path):
    scalars = {name: x.reshape(()) for name, x in written_folder.tensors(folders["nvfp4"]).items()
               if name.endswith("_global_scale")}
    same = changed(folders["nvfp4"], tmp_path / "a", tensors=scalars)
    jax.tree.map(np.testing.assert_array_equal, load_params(same)[1], load_params(folders["nvfp4"])[1])
    shapes = [name for name in written_folder.tensors(folders["int4"]) if name.endswith("_shape")]
    check_weights(changed(folders["int4"], tmp_path / "b", tensors=dict.fromkeys(shapes)))


def test_a_published_shape_in_four_bits_is_known_by_its_name():
    shape = known_shape("models/Qwen3-32B-NVFP4")
    assert shape is not None and shape.packed is not None and shape.packed.form == "nvfp4"
    plain = known_shape("models/Qwen3-32B")
    assert plain is not None and plain.packed is None and shape != plain
    assert json.loads(json.dumps(shape.to_hf()))["quantization_config"]["format"] == "nvfp4-pack-quantized"
    assert MODEL.packed is None and "quantization_config" not in MODEL.to_hf()
