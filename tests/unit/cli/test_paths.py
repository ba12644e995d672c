"""Paths as people write them: ~ and $NAME in every setting that is a path, ~ in every path of the command
line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxfp8rl.cli import main
from jaxfp8rl.cli.settings import settings
from jaxfp8rl.config.schema import SECTIONS
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.training.resume import check_forkable

PATHS = {
    "run.dir", "model.path", "model.tokenizer", "lora.path", "reference.path", "task.path",
    "task.held_out_path",
    "task.scorer_folder",
    "rollout.engine_token_file", "train.compilation_cache",
}


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_no_setting_that_is_a_path_is_left_out():
    words = ("path", "folder", "file", "dir", "tokenizer", "cache", "url")
    named = {s.name for s in settings() if s.kind == "text" and any(w in s.key.split("_") for w in words)}
    assert named == PATHS


@pytest.mark.parametrize("name", sorted(PATHS))
def test_a_path_has_home_and_the_environment_put_in(name, home):
    section, key = name.split(".")
    needed = {"run": {"dir": "x", "steps": 1}, "task": {"kind": "file", "max_prompt_tokens": 1},
              "train": {"row_tokens": 16},
              "rollout": dict.fromkeys(["prompts_per_step", "samples_per_prompt", "max_new_tokens"], 1)}
    read = lambda path: getattr(SECTIONS[section](**needed.get(section, {}) | {key: path}), key)
    assert read("~/a b") == f"{home}/a b" and read("$SCRATCH/a") == read("${SCRATCH}/a") == "/scratch/me/a"
    assert read("a/~/b") == "a/~/b" and read("cost$") == "cost$"
    with pytest.raises(ValueError, match=r"\$NOWHERE_AT_ALL/a: the environment has no \$NOWHERE_AT_ALL"):
        read("$NOWHERE_AT_ALL/a")


def test_a_name_that_is_not_set_is_said_where_it_stands():
    with pytest.raises(ConfigError,
                       match=r"--run.dir: \$NOWHERE_AT_ALL/a: the environment has no \$NOWHERE_AT_ALL"):
        load_config("demo", ["--run.dir", "$NOWHERE_AT_ALL/a"])


def test_characters_are_no_path(home):
    assert load_config("demo", ["--model.tokenizer",
                                "chars:0123456789+-*=$HOME~"]).model.tokenizer.endswith("=$HOME~")


def test_the_command_line_knows_home(home, capsys):
    run = home / "runs" / "a"
    run.mkdir(parents=True)
    (run / "config.toml").write_text(dump_config(load_config("demo")))
    (home / "mine.toml").write_text(dump_config(load_config("demo")))
    assert main.main(["config", "~/mine.toml"]) == main.main(["config", "~/runs/a"]) == 0
    assert main.main(["config", "--diff", "~/runs/a", "~/mine.toml"]) == 0
    assert load_config("~/mine.toml") == load_config("demo")
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "time/step_s": 1.0}) + "\n"
                                               for i in range(2)))
    assert main.main(["report", "~/runs/a", "--out=~/page.html"]) == 0 and (home / "page.html").is_file()
    capsys.readouterr()
    for words in (["eval", "~/runs/b"], ["export", "~/runs/b", "~/out"],
                  ["train", "demo", "--fork", "~/runs/b"],
                  ["import-gguf", "~/out", "--gguf=~/b.gguf"],
                  ["eval", "~/runs/a", "--out", "~/not/there.json"]):
        assert main.main(words) == 2
        assert str(home) in (said := capsys.readouterr().err) and "~" not in said, said
    with pytest.raises(ConfigError, match=f"{home}/runs/b is not a run directory"):
        check_forkable(load_config("demo"), "~/runs/b@3")
