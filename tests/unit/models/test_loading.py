"""Hugging Face folders: what is written is what transformers reads, and every broken folder is refused with
its reason."""

from __future__ import annotations

import dataclasses
import json

import chex
import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxfp8rl.errors import ModelError
from jaxfp8rl.models import loading
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import empty_params, param_table
from jaxfp8rl.models.loading import load_params, save_params
from jaxfp8rl.models.rope import Llama3Rope

pytestmark = pytest.mark.usefixtures("quick_compile")

QWEN3 = ModelConfig("Qwen3ForCausalLM", 33, 16, 24, 2, 4, 2, 8, 64, eos_token_ids=(2,), dtype="bfloat16")
TIED = dataclasses.replace(QWEN3, tie_word_embeddings=True)
LLAMA = dataclasses.replace(
    QWEN3, architecture="LlamaForCausalLM", head_dim=4, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 32),
    eos_token_ids=(2, 3)
)


def random_params(cfg: ModelConfig, seed: int = 0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: rng.standard_normal(a.shape, np.float32), empty_params(cfg, np.float32))


def rounded(params):
    return jax.tree.map(lambda a: a.astype(bfloat16).astype(np.float32), params)


def raw(folder):
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_read_in_the_type_that_they_are_stored_in(dtype, tmp_path):
    save_params(tmp_path / "out", QWEN3, random_params(QWEN3), dtype=dtype)
    stored, exact = (load_params(tmp_path / "out", dtype=d)[1] for d in ("stored", "float32"))
    assert {a.dtype for a in jax.tree.leaves(stored)} == {loading.numpy_dtype(dtype)}
    chex.assert_trees_all_equal(jax.tree.map(lambda a: a.astype(np.float32), stored), exact)


def test_weights_of_several_types_are_read_in_float32(saved):
    rewrite(saved, lambda t: t.update({name: t[name].astype(np.float16) for name in t if "norm" in name}))
    assert {a.dtype for a in jax.tree.leaves(load_params(saved, dtype="stored")[1])} == {np.dtype(np.float32)}


@pytest.fixture
def saved(tmp_path):
    """A good folder of QWEN3, for tests to break."""
    save_params(tmp_path / "model", QWEN3, random_params(QWEN3))
    return tmp_path / "model"


def rewrite(folder, change):
    tensors = load_file(folder / loading.SINGLE)
    change(tensors)
    save_file(tensors, folder / loading.SINGLE, metadata={"format": "pt"})


# --- there and back
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cfg", [QWEN3, TIED, LLAMA], ids=["qwen3", "tied", "llama3"])
def test_save_load_round_trip(cfg, tmp_path):
    params = random_params(cfg)
    save_params(tmp_path / "out", cfg, jax.tree.map(jax.numpy.asarray, params))
    got_cfg, got = load_params(tmp_path / "out")
    assert got_cfg == cfg
    chex.assert_trees_all_equal(got, rounded(params))
    in_bf16 = load_params(tmp_path / "out", dtype="bfloat16")[1]
    assert {a.dtype for a in jax.tree.leaves(in_bf16)} == {np.dtype(bfloat16)}
    assert {path.stat().st_mode & 0o777
            for path in (tmp_path / "out").iterdir()} == {0o644}, "another account may read it"


@pytest.mark.parametrize("cfg", [QWEN3, TIED, LLAMA], ids=["qwen3", "tied", "llama3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_transformers_saves_equal_bytes_again(cfg, dtype, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_params(tmp_path / "ours", cfg, random_params(cfg), dtype=dtype, max_shard_bytes=5000)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert str(model.dtype) == f"torch.{dtype}"
    model.save_pretrained(tmp_path / "theirs")
    ours, theirs = raw(tmp_path / "ours"), raw(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and ours[name].tobytes() == theirs[name].tobytes(), name
    chex.assert_trees_all_equal(load_params(tmp_path / "theirs")[1], load_params(tmp_path / "ours")[1])
    assert load_params(tmp_path / "theirs")[0] == dataclasses.replace(cfg, dtype=dtype)


@given(limit=st.integers(1, 20_000))
def test_shards_hold_every_tensor_once_within_the_limit(limit):
    sizes = {e.hf_name: 2 * int(np.prod(e.shape)) for e in param_table(QWEN3)}
    shards = loading.split(sizes, limit)
    assert [name for shard in shards for name in shard] == list(sizes)
    assert all(sum(map(sizes.get, shard)) <= limit or len(shard) == 1 for shard in shards)


def test_sharded_index(tmp_path):
    params = random_params(QWEN3)
    save_params(tmp_path / "out", QWEN3, params, max_shard_bytes=3000)
    index = json.loads((tmp_path / "out" / loading.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in raw(tmp_path / "out").values())
    chex.assert_trees_all_equal(load_params(tmp_path / "out")[1], rounded(params))


def test_tokenizer_files_are_copied(tmp_path):
    (tmp_path / "source").mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors", "notes.txt"):
        (tmp_path / "source" / name).write_text(name)
    save_params(tmp_path / "out", QWEN3, random_params(QWEN3), tokenizer_from=tmp_path / "source")
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"tokenizer.json", "chat_template.jinja", "config.json", loading.SINGLE}
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"


def test_a_failed_save_leaves_nothing_behind(tmp_path):
    params = random_params(QWEN3)
    del params["lm_head"]
    with pytest.raises(KeyError):
        save_params(tmp_path / "out", QWEN3, params)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_the_users_to_hear_of(tmp_path, monkeypatch):
    def save_file(*_, **__):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(loading, "save_file", save_file)
    with pytest.raises(ModelError, match="out cannot be written: I/O error: No space left.*\n.*make room"):
        save_params(tmp_path / "out", QWEN3, random_params(QWEN3))
    assert list(tmp_path.iterdir()) == []


def test_save_never_overwrites(saved):
    before = (saved / loading.SINGLE).read_bytes()
    with pytest.raises(ModelError, match="not empty"):
        save_params(saved, QWEN3, random_params(QWEN3, seed=1))
    assert (saved / loading.SINGLE).read_bytes() == before


ENDS = "lm_head.weight", "model.embed_tokens.weight"


def test_tied_weights_may_be_there_twice_when_equal(tmp_path):
    folder = tmp_path / "model"
    save_params(folder, TIED, random_params(TIED))
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    load_params(folder)
    rewrite(folder,
            lambda t: t.update({name: t["model.embed_tokens.weight"] * np.float32(1.01) for name in ENDS}))
    load_params(folder, dtype="bfloat16")  # stored in float32, and compared there
    rewrite(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] * np.float32(1.0001)}))
    with pytest.raises(ModelError, match="tie_word_embeddings is true but lm_head.weight differs"):
        load_params(folder, dtype="bfloat16")


def test_old_rope_buffers_are_no_weights(saved):
    rewrite(saved,
            lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}))
    load_params(saved)


# --- what is refused
# --------------------------------------------------------------------------------------------------


def test_missing_folder(tmp_path):
    with pytest.raises(ModelError, match="no model folder at .*nowhere.*\n.*nothing is downloaded"):
        load_params(tmp_path / "nowhere")


def test_missing_config(saved):
    (saved / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no model config at .*config\.json"):
        load_params(saved)


def test_no_weights(saved):
    (saved / loading.SINGLE).unlink()
    with pytest.raises(ModelError, match="neither model.safetensors nor"):
        load_params(saved)
    (saved / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="pytorch_model.bin and no safetensors: a pickle runs code"):
        load_params(saved)


def test_missing_tensors_are_listed(saved):
    rewrite(saved, lambda t: [t.pop(f"model.layers.1.mlp.{n}_proj.weight") for n in ("gate", "down")])
    with pytest.raises(ModelError,
                       match=r"2 of 25 .*layers\.1\.mlp\.gate_proj\.weight, "
                             r"model\.layers\.1\.mlp\.down_proj"):
        load_params(saved)


def test_missing_head_suggests_tying(saved):
    rewrite(saved, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(ModelError, match="set tie_word_embeddings to true"):
        load_params(saved)


def test_unknown_tensor_names_the_nearest(saved):
    rewrite(saved, lambda t: t.update({"model.layers.0.mlp.gate_porj.weight": np.ones(2, np.float32)}))
    with pytest.raises(ModelError,
                       match=r'gate_porj\.weight \(did you mean "model\.layers\.0\.mlp\.gate_proj\.weight"'):
        load_params(saved)


def test_wrong_shape(saved):
    rewrite(saved, lambda t: t.update({"model.norm.weight": np.ones(17, np.float32)}))
    with pytest.raises(ModelError, match=r"model.norm.weight has shape \[17\], config.json says \[16\]"):
        load_params(saved)


def test_quantised_tensor(saved):
    rewrite(saved, lambda t: t.update({"model.norm.weight": np.ones(16, np.uint8)}))
    with pytest.raises(ModelError, match="model.norm.weight is U8, only BF16, F16 and F32"):
        load_params(saved)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_truncated_file(saved, keep):
    path = saved / loading.SINGLE
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match="model.safetensors cannot be read, it is corrupt or cut short"):
        load_params(saved)


def test_garbage_file(saved):
    (saved / loading.SINGLE).write_bytes(np.random.default_rng(0).bytes(4096))
    with pytest.raises(ModelError, match="corrupt"):
        load_params(saved)


@pytest.fixture
def sharded(tmp_path):
    save_params(tmp_path / "model", QWEN3, random_params(QWEN3), max_shard_bytes=3000)
    return tmp_path / "model"


def test_missing_shard(sharded):
    next(sharded.glob("model-00002-*")).unlink()
    with pytest.raises(ModelError,
                       match="model-00002-of-.* is named in model.safetensors.index.json and missing"):
        load_params(sharded)


@pytest.mark.parametrize(
    "index, says",
    [
        ("{", "not a safetensors index"),
        ('{"metadata": {}}', "not a safetensors index: KeyError"),
        ('{"weight_map": {"a": "../../etc/passwd"}}', "is not a file name of this folder"),
        ('{"weight_map": {"model.absent.weight": "model-00001-of-%s.safetensors"}}',
         "places model.absent.weight here"),
    ],
)
def test_broken_index(sharded, index, says):
    count = next(sharded.glob("model-00001-*")).stem[-5:]
    (sharded / loading.INDEX).write_text(index.replace("%s", count))
    with pytest.raises(ModelError, match=says):
        load_params(sharded)
