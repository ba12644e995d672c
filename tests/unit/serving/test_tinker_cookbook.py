"""tinker-cookbook's numerics check and its minimal RL loop, unmodified, against a real server on the CPU.

`make cookbook` installs the cookbook in a folder, which the variable TINKER names, and runs this. The recipes
run as the cookbook says, `python -m tinker_cookbook.recipes...`, with a tiny model of random weights, a
tokenizer of bytes, and small stand-ins for their data sets, which lie where the recipes look for them.
`test_tinker_client.py` is the fast form.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tinker_server import KEY, client, config, datum, serving, tinker

pytest.importorskip("tinker_cookbook", reason="tinker-cookbook is not installed: make cookbook")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxfp8rl.serving.service import Limits

NAME = "Qwen/Qwen3-4B-Instruct-2507"  # a name that the cookbook knows the renderer of
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# the minimal loop's own words
ASKED = " Provide a numerical answer without units, written inside \\boxed{}."
SPELLED = ("Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r "
           "10) y. We have r's at positions 3, 8, and 9. \\boxed{3}")
QUESTION = "Tom has {} apples and buys 2 more. How many does he have?"


def write_tokenizer(folder: Path) -> None:
    """One token a byte, and the marks of a turn."""
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    (folder / "tokenizer_config.json").write_text(json.dumps(kinds))


def write_data(folder: Path, name: str, split: str, rows: list[dict]) -> None:
    """A data set with one split, for `datasets.load_dataset(FOLDER, NAME)`."""
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    head = (f"---\nconfigs:\n- config_name: {name}\n  data_files:\n  - split: {split}\n"
            "    path: rows.jsonl\n---\n")
    (folder / "README.md").write_text(head)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """The folder in which recipes run: the tokenizer and the data sets lie under their names."""
    folder = tmp_path_factory.mktemp("cookbook")
    write_tokenizer(folder / NAME)
    answers = [{"question": QUESTION.format(i % 5), "answer": "He has three. #### 3"} for i in range(64)]
    write_data(folder / "openai/gsm8k", "main", "train", answers)
    text = ("They went over the hill before noon , and when it was late they came after them only to see "
            "the time . ")
    write_data(folder / "Salesforce/wikitext", "wikitext-103-raw-v1", "train", [{"text": text * 3}] * 200)
    return folder


@contextlib.contextmanager
def server(place: Path, row_tokens: int, **changes: int) -> Iterator[str]:
    """The URL of a server of a tiny model, for prompts and data of up to `row_tokens`."""
    cfg = config(
        place / "run", model__tokenizer=str(place / NAME), model__config__vocab_size=272,
        model__config__max_position_embeddings=4096, model__config__num_hidden_layers=2,
        task__max_prompt_tokens=row_tokens - 98, rollout__max_new_tokens=90, train__row_tokens=row_tokens,
        **changes)
    with serving(cfg, place / "weights", limits=Limits(1, 3, lora_as_all_parameters=True), name=NAME) as url:
        yield url


def recipe(place: Path, url: str, name: str, *words: str) -> list[dict]:
    """Run a recipe -> the lines of its metrics."""
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), os.environ.get("TINKER")]))
    done = subprocess.run(
        [sys.executable, "-m", f"tinker_cookbook.recipes.{name}", f"model_name={NAME}", f"base_url={url}",
         f"log_path={place / name}", *words],
        cwd=place, env=os.environ | {"PYTHONPATH": path, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1",
                                     "HF_HOME": str(place / "hf"), "WANDB_MODE": "disabled"},
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in (place / name / "metrics.jsonl").read_text().splitlines()]


def test_the_numerics_check(place):
    """The KL between sampler and trainer, as the check itself computes it. Random weights call no tool, so
    that every episode ends with its first turn of some 1,500 tokens, and its reward moves nothing."""
    with server(place, 2048, train__rows_per_microbatch=4, rollout__min_num_seqs=8) as url:
        found = recipe(place, url, "rl_numerics_check.train", "group_size=4", "groups_per_batch=2",
                       "max_steps=2", "max_tokens=40", "max_trajectory_tokens=1950", "task.num_pages_min=2",
                       "task.num_pages_max=3", "task.page_chars=200", "learning_rate=1e-3", "save_every=0")
    steps = [m for m in found if "optim/kl_sample_train_v1" in m]
    assert len(steps) == 2
    for m in steps:
        assert abs(m["optim/kl_sample_train_v1"]) < 1e-6 and m["optim/kl_sample_train_v2"] < 1e-6
        assert m["optim/entropy"] > 1


def prompts(place: Path) -> list[list[int]]:
    """What the minimal loop sends: its own example of an answer, then a question."""
    from tinker_cookbook import renderers
    from tinker_cookbook.tokenizer_utils import get_tokenizer

    renderer = renderers.get_renderer("qwen3_instruct", get_tokenizer(str(place / NAME)))
    said = lambda role, content: {"role": role, "content": content}
    shown = [said("user", f"How many r's are in strawberry?{ASKED}"), said("assistant", SPELLED)]
    asked = [[*shown, said("user", QUESTION.format(i) + ASKED)] for i in range(5)]
    return [renderer.build_generation_prompt(turns).to_ints() for turns in asked]


def taught(place: Path, url: str, log_path: Path) -> None:
    """Teach the model to answer with some digit in a box, and save it where the loop goes on from."""
    from tinker_cookbook import checkpoint_utils

    tokenizer, asked = Tokenizer.from_file(str(place / NAME / "tokenizer.json")), prompts(place)
    answers = [tokenizer.encode(f"\\boxed{{{i}}}<|im_end|>").ids for i in range(10)]
    with client(url) as service:
        trainer = service.create_lora_training_client(NAME).result(60)
        for step in range(48):
            data = [datum(asked[(i + step) % 5], answers[i], weights=1.0) for i in range(10)]
            passed = trainer.forward_backward(data, "cross_entropy")
            trainer.optim_step(tinker.types.AdamParams(learning_rate=5e-3)).result(60)
        assert passed.result(60).metrics["loss:sum"] / 10 < 3  # ln 10 for the digit, little for the rest
        checkpoint_utils.save_checkpoint(trainer, "taught", str(log_path), {"batch": 0})


def test_the_minimal_loop_learns(place):
    log_path = place / "rl_loop"
    log_path.mkdir()
    with server(place, 512, train__rows_per_microbatch=10, rollout__min_num_seqs=64) as url:
        taught(place, url, log_path)
        found = recipe(place, url, "rl_loop", "batch_size=2", "group_size=32", "max_steps=8", "max_tokens=16",
                       "learning_rate=5e-3", "loss_fn=importance_sampling", "save_every=4")
    rewards = [m["reward/total"] for m in found if "reward/total" in m]
    assert len(rewards) == 8 and np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.1
    saved = [json.loads(line)["name"] for line in (log_path / "checkpoints.jsonl").read_text().splitlines()]
    assert saved[0] == "taught" and saved[-1] == "final"
