"""What a run keeps of the model that it began with, and which other folder may take that one's place."""

from __future__ import annotations

import json

import pytest

from jaxfp8rl.checkpoint.base_model import check_base_model, keep_base_model, with_base_model
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.errors import CheckpointError
from jaxfp8rl.models.config import ModelConfig


def folder(path, **changes):
    """A model folder without weights, which nobody asks for."""
    load_tokenizer("chars:0123456789+-*=").save(str(path))
    shape = ModelConfig.from_hf(load_config("demo").model.config).to_hf()
    (path / "config.json").write_text(json.dumps(shape | changes))
    return path


@pytest.fixture
def run(tmp_path):
    """A run directory of a model at `tmp_path`/model, which is gone."""
    model = folder(tmp_path / "model")
    words = ["--run.dir", str(tmp_path / "run"), "--model.path", str(model), "--model.config", "{}",
             "--model.tokenizer", ""]
    cfg = load_config("demo", words)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text(dump_config(cfg))
    keep_base_model(cfg, tmp_path / "run")
    model.rename(tmp_path / "moved")
    return tmp_path / "run"


def resumed(run, *words):
    return load_config(str(run / "config.toml"), words)


def test_copies_stand_for_a_folder_that_is_gone_and_that_is_said(run, capsys):
    cfg = with_base_model(resumed(run), run)
    assert cfg.model.path == str(run / "base_model" / "path") and "is gone" in capsys.readouterr().out
    assert load_tokenizer(cfg.model.path).fingerprint() == load_tokenizer(
        str(run.parent / "moved")).fingerprint()
    check_base_model(cfg, run)
    folder(run.parent / "model")  # there again
    assert with_base_model(resumed(run), run) == resumed(run) and capsys.readouterr().out == ""


def test_adapters_want_the_weights_of_their_base(run):
    adapters = resumed(run, "--lora.rank", "4", "--sft.steps", "0")
    with pytest.raises(CheckpointError, match="model.path: .*model is gone, .*adapters.*\n.*--model.path"):
        with_base_model(adapters, run)


def test_a_folder_that_was_asked_for_is_no_other(run):
    for name in ("moved", "mistyped"):
        cfg = resumed(run, "--model.path", str(run.parent / name))
        assert with_base_model(cfg, run) == cfg
    check_base_model(resumed(run, "--model.path", str(run.parent / "moved")), run)


def test_a_folder_of_another_model_is_refused_with_the_difference(run):
    """No shape of a checkpoint tells of its norms."""
    folder(run.parent / "other", rms_norm_eps=1e-5)
    with pytest.raises(CheckpointError,
                       match=r"is another model than the run began with: rms_norm_eps: 1e-06 -> 1e-05"):
        check_base_model(resumed(run, "--model.path", str(run.parent / "other")), run)


def test_a_tokenizer_has_a_folder_of_its_own(tmp_path, capsys):
    run = tmp_path / "run"
    cfg = load_config("demo", ["--run.dir", str(run), "--model.tokenizer", str(folder(tmp_path / "words"))])
    run.mkdir()
    (run / "config.toml").write_text(dump_config(cfg))
    keep_base_model(cfg, run)
    (tmp_path / "words").rename(tmp_path / "away")
    assert with_base_model(cfg, run).model.tokenizer == str(run / "base_model" / "tokenizer")
    assert "model.tokenizer" in capsys.readouterr().out


def test_where_an_earlier_version_has_kept_nothing_that_is_said(run, capsys):
    (run / "base_model" / "path" / "config.json").unlink()
    cfg = resumed(run, "--model.path", str(run.parent / "moved"))
    check_base_model(cfg, run)
    assert "nothing is left to compare" in capsys.readouterr().out
    assert with_base_model(resumed(run), run) == resumed(run)
