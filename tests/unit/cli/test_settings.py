"""What teaches: every setting says what it is, is found by a word of it, and is completed by the shell."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path
from shutil import which

import pytest

from jaxfp8rl.cli import main
from jaxfp8rl.cli.completion import SHELLS
from jaxfp8rl.cli.settings import find, settings
from jaxfp8rl.config.schema import Config
from jaxfp8rl.config.toml import presets


def test_every_setting_says_what_it_is():
    everything = settings()
    assert len(everything) == len({s.name for s in everything}) > 100
    assert [s.name for s in everything if not s.description] == []
    required = {s.name for s in everything if s.default is None}
    assert {"run.dir", "task.kind", "train.row_tokens"} <= required and "optim.lr" not in required
    for s in everything:  # a default is TOML, and the one that holds
        if s.default:
            field = Config.model_fields[s.section].annotation.model_fields[s.key]
            value = tomllib.loads(f"x = {s.default}")["x"]
            assert value == (list(field.default) if isinstance(field.default, tuple)
                             else field.default), s.name
            assert not s.choices or str(value) in s.choices


def test_types_limits_and_choices_are_said():
    said = {s.name: s.kind for s in settings()}
    assert said["optim.lr"] == "number, > 0" and said["rollout.top_p"] == "number, > 0, <= 1"
    assert said["run.steps"] == "integer, >= 1" and said["rollout.kv_cache_gib"] == "number, > 0, or auto"
    assert said["rollout.sleep"] == "off | keep_weights | drop_weights" and said[
        "task.chat"] == "true or false"
    assert said["rollout.server_gpus"] == "list of integer" and said["model.config"] == "table"


def test_a_word_finds_names_before_meanings(capsys):
    assert [s.name for s in find("lr")][:2] == ["optim.lr", "sft.lr"]
    assert [s.name for s in find("--train.remat")] == ["train.remat"] and find("REMAT") == find("remat")
    assert find("learning_rate")[0].name == "optim.lr"
    assert "optim.offload" in {s.name for s in find("pinned host memory")} and "rollout.engine" in {
        s.name for s in find("vllm")}
    assert main.main(["config", "--find", "warmup"]) == 0
    assert "--optim.warmup_steps  integer, >= 0; default 0\n      updates over which" in capsys.readouterr(
        ).out


def test_config_without_a_config_lists_everything(capsys):
    assert main.main(["config"]) == 0
    out = capsys.readouterr().out
    assert all(f"--{s.name}  " in out
               for s in settings()) and all(f"[{name}]  " in out for name in Config.model_fields)


def test_presets_are_listed_with_what_they_are_for(capsys):
    assert main.main(["config", "--presets"]) == 0
    out = capsys.readouterr().out
    for name in presets():
        assert f"{name}\n  " in out
    assert "demo\n  Some three minutes on two CPU cores" in out and "[run]" not in out and "MiB" not in out


def test_a_difference_has_both_values(capsys, tmp_path):
    assert main.main(["config", "demo", "--run.seed", "7", "--loss.clip_high", "0.3"]) == 0
    (tmp_path / "config.toml").write_text(capsys.readouterr().out)
    # a run directory stands for its config
    assert main.main(["config", "--diff", "demo", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "run.seed: 0 -> 7\nloss.clip_high: absent -> 0.3\n"
    assert main.main(["config", "--diff", "demo", "demo"]) == 0
    assert capsys.readouterr().out == "no setting differs\n"


@pytest.mark.parametrize(
    "words, says",
    [
        (["--find", "lrr"], "no setting matches 'lrr'\n  next step: jaxfp8rl config --find lr"),
        (["--optim.lr", "1"], "--optim.lr: there is no CONFIG to override"),
        (["demo", "--find", "lr"], "demo: --presets, --find and --diff take no CONFIG"),
        (["--diff", "demo", "nowhere"], "nowhere: no such file"),
    ],
)
def test_questions_without_an_answer(words, says, capsys):
    assert main.main(["config", *words]) == 2
    assert says in capsys.readouterr().err


def test_the_help_of_a_command_names_every_setting(capsys):
    with pytest.raises(SystemExit):
        main.main(["train", "--help"])
    out = capsys.readouterr().out.split("Every setting of CONFIG", 1)[1].replace(",", " ").split()
    assert {s.key for s in settings()} | set(Config.model_fields) <= set(out)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("completion"), {}
    for shell in SHELLS:
        found[shell] = folder / shell
        found[shell].write_text(main.completion(main._parser(), shell))
    return found


@pytest.mark.parametrize(
    "words, expected",
    [
        (["ex"], {"experiment", "export"}),
        (["train", "de"], {"demo"}),
        (["train", "--optim.l"], {"--optim.lr"}),
        (["train", "demo", "--rollout.engine", ""], {"auto", "jax", "vllm", "served"}),
        (["eval", "demo", "--sam"], {"--samples"}),
        (["experiment", "run", "adder_"], {"adder_recipes", "adder_vllm"}),
        (["export", "pyproj"], {"pyproject.toml"}),
        (["export", "runs", "out", "--format", ""], {"adapter", "bf16", "fp8", "int4", "mxfp4", "nvfp4"}),
        (["completion", ""], set(SHELLS)),
        (["bench", "gem"], {"gemm"}),
        (["config", "--diff", "de"], {"demo"}),
        (["train", "demo", "--fork", "jaxfp8rl/mon"], {"jaxfp8rl/monitors"}),
    ],
    ids=lambda x: " ".join(sorted(x) if isinstance(x, set) else x),  # the same in every process
)
def test_bash_completes(words, expected, scripts):
    ask = ('source "$0"; COMP_WORDS=(jaxfp8rl "$@"); COMP_CWORD=$#; _shtab_jaxfp8rl; '
           'printf "%s\\n" "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", ask, scripts["bash"], *words], capture_output=True, text=True,
                          check=True,
                          cwd=Path(__file__).parents[3])
    assert set(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_valid_in_its_shell(shell, scripts):
    if not which(shell):
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", scripts[shell]], check=True)


def test_fish_completes(scripts):
    if not which("fish"):
        pytest.skip("fish is not installed")
    ask = f'source {scripts["fish"]}; complete -C "jaxfp8rl train --optim.l"'
    done = subprocess.run(["fish", "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout == "--optim.lr\tlearning rate after the warm-up\n"
