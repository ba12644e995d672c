"""Row 35 of docs/faults.md: a run is resumed with other settings."""

from __future__ import annotations

import pytest
from small_checkpoint import LIKE

from jaxfp8rl.checkpoint.store import Checkpoints
from jaxfp8rl.config.resume_rules import MAY_CHANGE, changes, check_resumable, described
from jaxfp8rl.config.schema import SECTIONS
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.errors import CheckpointError, ConfigError
from jaxfp8rl.run.run_directory import RunDirectory, check_run_directory
from jaxfp8rl.training.resume import check_forkable


def test_row_35_what_is_changed_is_kept_with_the_first_step_that_it_is_of(tmp_path):
    """Not at the end of the run, not when the gate fails; and config.toml is replaced, never written to."""
    words = ["--run.dir", str(tmp_path), "--run.steps", "4"]
    begun, other = load_config("demo", words), load_config("demo", [*words, "--optim.lr", "0.5"])
    path = tmp_path / "config.toml"
    with RunDirectory(begun, resume=False) as run:
        run.log({"step": 2})
    before = path.read_text()
    for step in (4, 2):
        with RunDirectory(other, resume=True) as run:
            run.rewind(step)
        assert path.read_text() == before
    with path.open() as reader, RunDirectory(other, resume=True) as run:
        run.rewind(2)
        run.log({"step": 3})
        assert load_config(str(path)) == other and reader.read() == before


def test_row_35_a_run_is_not_resumed_to_before_its_newest_checkpoint(run):
    cfg = load_config(str(run.path / "config.toml"))
    check_run_directory(cfg, resume=True)
    shorter = cfg.model_copy(update={"run": cfg.run.model_copy(update={"steps": 1})})
    with pytest.raises(ConfigError, match="run.steps = 1: the newest checkpoint of .* is of step 2"):
        check_run_directory(shorter, resume=True)


def test_a_run_that_keeps_no_checkpoint_is_refused_before_anything_loads(tmp_path):
    cfg = load_config("demo", ["--run.dir", str(tmp_path), "--run.save_every", "0"])
    with RunDirectory(cfg, resume=False) as run:
        run.log({"step": 1})
    with pytest.raises(CheckpointError) as early:
        check_run_directory(cfg, resume=True)
    with pytest.raises(CheckpointError) as late:
        Checkpoints(tmp_path / "checkpoints", 1).restore(LIKE)
    assert str(early.value) == str(late.value) and "no complete checkpoint to go on from\n" in str(late.value)


OTHER = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: x / 2 + 1e-9, str: lambda x: x + "x",
         tuple: lambda x: (*x, 1), dict: lambda x: x | {"more": 1}, type(None): lambda x: 1}


def test_row_35_every_setting_may_change_or_is_refused_with_the_difference(tmp_path):
    cfg = load_config("demo", ["--run.dir", str(tmp_path)])
    with RunDirectory(cfg, resume=False):
        pass
    check_resumable(cfg)
    known = {(s, k) for s, model in SECTIONS.items() for k in model.model_fields}
    assert {(s, k) for s, keys in MAY_CHANGE.items() for k in keys} <= known
    for section, key in sorted(known):
        old = getattr(getattr(cfg, section), key)
        new = OTHER[type(old)](old)
        part = getattr(cfg, section).model_copy(update={key: new})
        other = cfg.model_copy(update={section: part})
        assert changes(cfg, other) == {(section, key): (old, new)}
        if (section, key) == ("run", "dir"):
            continue
        if key in MAY_CHANGE.get(section, ()):
            check_resumable(other)
        else:
            with pytest.raises(CheckpointError) as e:
                check_resumable(other)
            (line, *more) = described({(section, key): (old, new)})
            assert f"\n  {line}\n" in str(e.value) and not more and "--fork" in e.value.next_step
            assert line.startswith(f"{section}.{key}")


def test_a_difference_is_told_key_by_key_in_toml():
    before = {("model", "config"): ({"a": 1, "rope": {"b": 2, "c": 3}},
                                    {"a": 1, "rope": {"b": 4, "c": 3}, "d": "x"}),
              ("loss", "pass_at_k"): (None, 4), ("task", "chat"): (False, True)}
    assert described(before) == ["model.config.rope.b: 2 -> 4", 'model.config.d: absent -> "x"',
                                 "loss.pass_at_k: absent -> 4", "task.chat: false -> true"]


@pytest.mark.parametrize("there, here, says", [
    ("--lora.rank 4", "", "has adapters of rank 4 on .*, factor 8, and lora asks for all parameters"),
    ("", "--lora.rank 4", "has all parameters, and lora asks for adapters of rank 4"),
    ("--lora.rank 4", "--lora.rank 4 --lora.alpha 8", "factor 8, and lora asks for .*, factor 2\n.*export"),
    ("--lora.rank 4", "--lora.rank 4 --lora.targets q_proj", "on q_proj, factor 8"),
    ("--lora.rank 4", "--lora.rank 4 --lora.path adapter", 'lora.path = "adapter" has no effect'),
])
def test_a_fork_keeps_the_adapters_of_its_checkpoint(there, here, says, tmp_path):
    """Another factor has the same shapes, and would change the policy at once."""
    config = lambda words: load_config("demo", ["--sft.steps", "0", *words.split()])
    (tmp_path / "config.toml").write_text(dump_config(config(there)))
    with pytest.raises(ConfigError, match=f"--fork .*: .*{says}"):
        check_forkable(config(here), str(tmp_path))
    with pytest.raises(CheckpointError):  # these are the same; there is no checkpoint
        check_forkable(config(there), str(tmp_path))
