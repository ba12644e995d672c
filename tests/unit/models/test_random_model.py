"""`jaxfp8rl random-model`: its folder is a model to transformers and to us, its bytes are the seed's, and its
weights and tokens are those of the shape."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import types
from pathlib import Path

import numpy as np
import pytest

from jaxfp8rl.cli import random_model
from jaxfp8rl.cli.main import main
from jaxfp8rl.data.random_tokenizer import random_tokenizer
from jaxfp8rl.data.tokenizer import check_fits, load_tokenizer
from jaxfp8rl.errors import ModelError
from jaxfp8rl.models import known, random_weights
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.loading import check_weights, load_params, write_json
from jaxfp8rl.models.packed_config import FORMS, Packed
from jaxfp8rl.rollout.stops import stops_of

QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 2000, "hidden_size": 192, "head_dim": 32,
         "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "max_position_embeddings": 512, "tie_word_embeddings": False}
GEMMA3 = QWEN3 | {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 64, "tie_word_embeddings": True}
QWEN2 = {k: v for k, v in QWEN3.items() if k != "head_dim"} | {"architectures": ["Qwen2ForCausalLM"]}
MOE = QWEN3 | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
               "moe_intermediate_size": 64}
CHAT = [{"role": "system", "content": "Answer briefly."}, {"role": "user", "content": "1 + 2, in Köln?"}]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """So that a tensor takes several parts."""
    monkeypatch.setattr(random_weights, "PART", 2**14)


def written(folder: Path, raw: dict, seed: int = 0, ends: int = 5, shard: float = 5e9,
            dtype: str = "bfloat16") -> Path:
    cfg = dataclasses.replace(ModelConfig.from_hf(raw), dtype=dtype)
    random_model.write_folder(folder, cfg, seed, ends, shard)
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("raw", [QWEN3, GEMMA3, QWEN2, MOE], ids=lambda raw: raw["architectures"][0])
def test_our_loader_takes_the_folder(raw, tmp_path):
    cfg, params = load_params(written(tmp_path / "m", raw))
    tokenizer = load_tokenizer(str(tmp_path / "m"))
    check_fits(tokenizer, cfg.vocab_size)
    assert tokenizer.vocab_size == cfg.vocab_size and cfg.eos_token_ids == tokenizer.eos_token_ids
    w, layers = params["embed_tokens"]["weight"], params["layers"]
    assert np.std(w) == pytest.approx(0.02, rel=0.01) and abs(np.mean(w)) < 1e-4 and np.max(np.abs(w)) > 0.07
    assert np.std(layers["self_attn"]["o_proj"]["weight"]) == pytest.approx(0.02 / 2, rel=0.01)
    gain = params["norm"]["weight"] + cfg.family.unit_offset
    assert np.all(layers["input_layernorm"]["weight"] == 1 - cfg.family.unit_offset)
    assert gain[0] * 0.02 * 192**0.5 == pytest.approx(0.25, rel=0.01)
    if cfg.family.qkv_bias:
        assert not layers["self_attn"]["q_proj"]["bias"].any()


@pytest.mark.parametrize("form", FORMS)
def test_random_codes_have_the_same_spread(form, tmp_path):
    shape = dataclasses.replace(ModelConfig.from_hf(QWEN3), packed=Packed(form), dtype="bfloat16")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "config.json", shape.to_hf())
        random_weights.write_random_weights(tmp_path / name, shape, 3, 1e5)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 3
    cfg, params = load_params(tmp_path / "a", dtype="stored")
    assert cfg.packed == shape.packed
    for name, depth in (("up_proj", 1), ("down_proj", 2)):
        weight = params["layers"]["mlp"][name]["weight"]
        codes = np.stack([weight.packed & 15, weight.packed >> 4], -1).reshape(*weight.scale.shape, -1)
        halves = np.array([0, 1, 2, 3, 4, 6, 8, 12]) / 2
        numbers = codes - 8.0 if form == "int4" else np.where(codes > 7, -1, 1) * halves[codes % 8]
        scale = 2.0 ** (weight.scale - 127.0) if form == "mxfp4" else weight.scale.astype(np.float32)
        values = numbers * scale[..., None] / (1 if form != "nvfp4"
                                               else weight.global_scale[:, None, None, None])
        assert np.std(values) == pytest.approx(0.02 / depth, rel=0.25 if form == "mxfp4" else 0.06)
        assert len(np.unique(weight.packed)) == 256


def test_transformers_takes_the_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = str(written(tmp_path / "m", QWEN3))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    ids = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert ids == ours.apply_chat(CHAT) and len(theirs) == 2000
    assert theirs.decode(ids) == ours.render_chat(CHAT)
    logits = model(**theirs("a few words of a text", return_tensors="pt")).logits.float()
    assert 0.15 < logits.std() < 0.35 and model.generation_config.eos_token_id == list(ours.eos_token_ids)


def test_the_same_seed_gives_the_same_bytes_in_shards_or_not(tmp_path):
    first, again = written(tmp_path / "a", QWEN3), written(tmp_path / "b", QWEN3)
    other, shards = written(tmp_path / "c", QWEN3, seed=1), written(tmp_path / "d", QWEN3, shard=4e5)
    assert digests(first) == digests(again) and digests(other).keys() == digests(first).keys()
    assert digests(other)["model.safetensors"] != digests(first)["model.safetensors"]
    assert len(list(shards.glob("*.safetensors"))) > 2
    whole, parts = load_params(first)[1], load_params(shards)[1]
    np.testing.assert_equal(parts, whole)


def test_no_two_tensors_or_parts_are_alike(tmp_path):
    attention = load_params(written(tmp_path / "m", QWEN3))[1]["layers"]["self_attn"]
    q = attention["q_proj"]["weight"]
    assert abs(np.corrcoef(q[0].ravel(), q[1].ravel())[0, 1]) < 0.03
    one = q[0].ravel()
    assert abs(np.corrcoef(one[:8192], one[2**14:][:8192])[0, 1]) < 0.05
    assert not np.array_equal(attention["k_proj"]["weight"], attention["v_proj"]["weight"])


@pytest.mark.parametrize("dtype, name", [("float32", "F32"), ("float16", "F16")])
def test_weights_have_the_type_that_was_asked_for(dtype, name, tmp_path):
    folder = written(tmp_path / "m", QWEN3, dtype=dtype)
    assert check_weights(folder).dtype == dtype
    assert f'"{name}"'.encode() in (folder / "model.safetensors").read_bytes()[:200]


def test_completions_end_at_the_turn_and_at_other_tokens():
    tokenizer = random_tokenizer(3000, ends=4)
    stops = stops_of(stop_settings(), tokenizer, chat=True)
    assert len(stops.token_ids) == 4 and not stops.notes
    assert tokenizer.decode(stops.token_ids[:1], skip_special_tokens=False) == "<|im_end|>"
    texts = [tokenizer.decode([i]) for i in stops.token_ids[1:]]
    assert all(text.startswith(" token") for text in texts)
    assert tokenizer.encode(" token2900") != [2900]  # no text gives such an id
    assert tokenizer.decode(range(3000), skip_special_tokens=False)  # no id is unknown
    text = "Zürich, 東京: x² != √y\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def stop_settings():
    from jaxfp8rl.config.sampling import Rollout

    return Rollout(prompts_per_step=1, samples_per_prompt=2, max_new_tokens=8)


def test_published_prompts_take_about_as_many_tokens_as_with_a_published_tokenizer():
    text = ("Calculate 139 using all of these numbers: 36, 29, 95, 32, 4, 15. Each number may be used at "
            "most once. Provide your solution as an arithmetic expression.")
    assert len(random_tokenizer(49152).encode(text)) < len(text) / 2.5


@pytest.mark.parametrize("size, ends, says", [(300, 1, "no room for all bytes"), (1000, 0, "--ends 0"),
                                              (1000, 900, "--ends 900: 1 to 498 tokens")])
def test_a_tokenizer_that_cannot_be_is_refused(size, ends, says):
    with pytest.raises(ModelError, match=says):
        random_tokenizer(size, ends)


def test_a_shape_has_its_published_names():
    one = known.shape_named("Qwen3-8B")
    assert one == known.shape_named("qwen3-8b-base") == known.shape_named("Qwen/Qwen3-8B")
    assert known.shape_named("qwen3-8b-nvfp4") == dataclasses.replace(one, packed=Packed("nvfp4"))
    assert known.shape_named("Llama-3.1-8B-Instruct").vocab_size == 128256
    assert known.shape_named("Qwen3-30B-A3B").experts.num_experts == 128


@pytest.mark.parametrize("words, says", [
    (["Qwen3-8", "out"], 'no published shape is named \'Qwen3-8\' (did you mean "Qwen3-8B"?)'),
    (["zebra", "out"], "known: Llama-3.1-8B"),
    (["Qwen3-0.6B", "full"], "full exists and is not empty"),
    (["Qwen3-0.6B", "full/x"], "full/x: cannot write to"),
    (["Qwen3-0.6B", "out", "--seed", "-1"], "--seed -1"),
    (["Qwen3-0.6B", "out", "--ends", "0"], "--ends 0"),
    (["Qwen3-0.6B", "out", "--end", "4"], '--end: did you mean "--ends"?'),
])
def test_a_slip_is_refused_before_a_byte_is_written(words, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if words[1].startswith("full/"):
        Path("full").write_text("a file")
    else:
        Path("full").mkdir()
        Path("full/mine").touch()
    assert main(["random-model", *words]) == 2
    assert says in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["full"]


def test_too_little_disk_says_how_much_is_needed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(random_weights.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=10 * 2**30))
    assert main(["random-model", "Qwen3-8B", str(tmp_path / "out")]) == 2
    assert "the weights take 15.3 GiB of disk, 10.0 GiB are free" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_command_writes_a_folder_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(known.KNOWN, "Qwen3-0.6B", QWEN3)
    out = tmp_path / "models" / "tiny"
    assert main(["random-model", "Qwen3-0.6B", str(out), "--dtype", "float32", "--ends", "2"]) == 0
    assert "in the shape of Qwen3-0.6B, 0.00 GB in float32" in capsys.readouterr().out
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [1999, 1000]
