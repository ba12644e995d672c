"""Reading a config: what loads, what every kind of mistake says, and that a dump loads back."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from config_files import GOOD, refusal

from jaxfp8rl.config import toml
from jaxfp8rl.config.problems import key_lines
from jaxfp8rl.config.schema import SECTIONS, Config
from jaxfp8rl.config.toml import load_config


def test_loads(write):
    cfg = load_config(write(GOOD))
    assert (cfg.run.steps, cfg.optim.lr, cfg.model.config["eos_token_id"]) == (3, 1e-6, [1, 2])


# (text taken out of GOOD, text put in, what the refusal says)
MISTAKES = {
    "unknown key": ("lr = 1e-6", "lrr = 1e-6", 'run.toml:24: optim.lrr: unknown key (did you mean "lr"?)'),
    "misplaced key": ("lr = 1e-6", "top_k = 1",
                      ':24: optim.top_k: unknown key: "top_k" belongs to rollout.top_k'),
    "unknown section": ("[optim]", "[optimizer]",
                        ':23: optimizer: unknown section or key (did you mean "optim"?)'),
    "key outside a section": ("[run]", "steps = 3\n[run]",
                              ':1: steps: unknown key: "steps" belongs to run.steps or sft.steps'),
    "typo outside a section": ("[run]", "temprature = 3\n[run]", '(did you mean "rollout.temperature"?)'),
    "wrong type": ("steps = 3", 'steps = "3"', ':3: run.steps: expected an integer, got "3" (a string)'),
    "fraction": ("steps = 3", "steps = 3.5", ":3: run.steps: expected an integer, got 3.5 (a number)"),
    "boolean for a number": ("lr = 1e-6", "lr = true",
                             ":24: optim.lr: expected a number, got true (a boolean)"),
    "number for a word": ('dir = "runs/x"', "dir = 7",
                          ":2: run.dir: expected a string, got 7 (an integer); quote it"),
    "date for a word": ('dir = "runs/x"', "dir = 2026-01-01", ":2: run.dir: expected a string"),
    "word for a list": ("steps = 3", 'steps = 3\ntrackers = "tensorboard"',
                        ":4: run.trackers: expected a list"),
    "unknown item": ("steps = 3", 'steps = 3\ntrackers = ["tensorbord"]', '(did you mean "tensorboard"?)'),
    "too small": ("steps = 3", "steps = 0", ":3: run.steps: must be at least 1, got 0"),
    "not positive": ("lr = 1e-6", "lr = 0", ":24: optim.lr: must be greater than 0, got 0"),
    "too large": ("lr = 1e-6", "b1 = 1.0", ":24: optim.b1: must be less than 1, got 1.0"),
    "infinite": ("lr = 1e-6", "lr = inf", ":24: optim.lr: must be finite, got inf"),
    "choice": ('"arithmetic"', '"arithmetik"',
               ':12: task.kind: "arithmetik" is not a choice (did you mean "arithmetic"?)'),
    "missing key": ("steps = 3\n", "", "run.toml:1: run.steps: missing; it has no default (GRPO steps"),
    "missing section": ("[train]\nrow_tokens = 32", "", "run.toml: train: missing"),
    "syntax": ("lr = 1e-6", "lr = ", "run.toml:24:6: not valid TOML: Invalid value\n    lr ="),
    "unclosed": ("lr = 1e-6", "lr = [1,", "not valid TOML"),
    "twice": ("lr = 1e-6", "lr = 1e-6\nlr = 2e-6",
              "run.toml:25:10: not valid TOML: Cannot overwrite a value"),
    "recipe": ("[optim]", '[precision]\nrecipe = "fp8_unifed"\n[optim]',
               ':24: precision.recipe: "fp8_unifed" is no recipe (did'),
    "fp8 without correction": (
        "[optim]", '[precision]\nrecipe = "fp8_unified"\n[correction]\npreset = "none"\n[optim]',
        ':24: precision.recipe "fp8_'
    ),
    "row too short": ("row_tokens = 32", "row_tokens = 20", ":21: train.row_tokens = 20 cannot hold"),
    "scorer": (
        'kind = "arithmetic"', 'kind = "file"\npath = "x.jsonl"\nscorer = "exakt"',
        ':14: task.scorer: unknown scorer "exakt"'
    ),
    "scorer of none": ('kind = "arithmetic"', 'kind = "arithmetic"\nscorer = "exact"',
                       ":13: task.scorer: a task of kind"),
    "no model": ('[model.config]\nhidden_size = 128\neos_token_id = [1, 2]', "", ":5: model: give either"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_named(write, mistake):
    old, new, says = MISTAKES[mistake]
    assert old in GOOD
    assert says in refusal(write(GOOD.replace(old, new, 1)))


def test_all_problems_of_a_file_at_once(write):
    bad = GOOD.replace("steps = 3", "stepz = 3").replace("lr = 1e-6", "lr = -1")
    message = refusal(write(bad))
    assert "3 problems" in message  # unknown stepz, missing steps, lr out of range
    assert ":3: run.stepz" in message and ":24: optim.lr" in message and "run.steps: missing" in message
    many = GOOD + "".join(f"k{i} = 1\n" for i in range(30))
    assert refusal(write(many)).count("unknown key") == 10 and "and 20 more" in refusal(write(many))


def test_every_field_refuses_a_wrong_type(write):
    """No field is lax: a table is accepted nowhere but where the schema says dict."""
    cfg = load_config(write(GOOD))
    data = cfg.model_dump()
    for section, model in SECTIONS.items():
        for key in model.model_fields:
            wrong = 5 if isinstance(data[section][key], dict) else {"a": 1}
            with pytest.raises(ValueError, match=key):
                Config.model_validate(data | {section: data[section] | {key: wrong}})


def test_lines_of_keys():
    text = 'a = [\n  1,\n  2,\n]\nb.c = """\nx = 1\n"""\n# note\n\n[t]\n  d = {e = 1}\n[t.u]\n'
    assert key_lines(text) == {
        ("a",): 1, ("b",): 5, ("b", "c"): 5, ("t",): 10, ("t", "d"): 11, ("t", "d", "e"): 11, ("t", "u"): 12,
    }


def test_missing_file_names_the_presets(tmp_path, monkeypatch):
    (tmp_path / "demo.toml").write_text(GOOD)
    monkeypatch.setattr(toml, "presets", lambda: {"demo": tmp_path / "demo.toml"})
    assert load_config("demo").run.steps == 3
    assert '"demo"' in refusal("dmo") and "no such file" in refusal("dmo")


def test_not_text(tmp_path):
    (tmp_path / "x.toml").write_bytes(b"\xff\xfe")
    assert "cannot be read as UTF-8" in refusal(str(tmp_path / "x.toml"))


def test_not_readable(tmp_path, monkeypatch):
    (tmp_path / "x.toml").write_text(GOOD)

    def read_text(self, encoding):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_text", read_text)
    said = refusal(str(tmp_path / "x.toml"))
    assert "x.toml: cannot be read: Permission denied" in said and "UTF-8" not in said


# --- overrides


@pytest.mark.parametrize(
    "words, section, key, value",
    [
        (["--optim.lr", "1e-3"], "optim", "lr", 1e-3),
        (["--optim.lr=2e-3"], "optim", "lr", 2e-3),
        (["--run.dir", "runs/a b"], "run", "dir", "runs/a b"),
        (["--run.dir", "2026-01-01"], "run", "dir", "2026-01-01"),
        (["--model.path="], "model", "path", ""),
        (["--model.config.hidden_size", "-1"], "model", "config",
         {"hidden_size": -1, "eos_token_id": [1, 2]}),
        (["--rollout.kv_cache_gib", "3", "--rollout.kv_cache_gib="], "rollout", "kv_cache_gib", None),
        (["--rollout.kv_cache_gib", "auto", "--rollout.engine", "vllm"], "rollout", "kv_cache_gib", "auto"),
        (["--optim.lr", "1e-9"], "optim", "lr", 1e-9),
        (["--run.keep-checkpoints", "5"], "run", "keep_checkpoints", 5),
        (["--run.trackers", '["tensorboard"]'], "run", "trackers", ("tensorboard",)),
        (["--model.config.hidden_size", "256"], "model", "config",
         {"hidden_size": 256, "eos_token_id": [1, 2]}),
        (["--train.remat", "mlp"], "train", "remat", "mlp"),
        (["--run.steps", "4", "--run.steps", "5"], "run", "steps", 5),
    ],
)
def test_override(write, words, section, key, value):
    assert getattr(getattr(load_config(write(GOOD), words), section), key) == value


@pytest.mark.parametrize(
    "words, says",
    [
        (["--optim.lrr", "1"], '--optim.lrr: unknown key (did you mean "lr"?)'),
        (["--lr", "1"], '--lr: unknown key: "lr" belongs to optim.lr or sft.lr'),
        (["--run.steps", "many"], '--run.steps: expected an integer, got "many" (a string)'),
        (["--task.name", "7"], "--task.name: expected a string, got 7 (an integer); quote it: '\"7\"'"),
        *((["--rollout.kv_cache_gib", bad],
           f'--rollout.kv_cache_gib: expected a number greater than 0, or "auto", got {said}')
          for bad, said in (("aut", '"aut"'), ("0", "0"), ("true", "True"), ("inf", "inf"))),
        (["--run.steps"], "--run.steps: a value is missing"),
        (["--run.steps", "--optim.lr", "1"], "--run.steps: a value is missing"),
        (["run.steps", "1"], "'run.steps': expected --section.key value"),
        (["--run.steps.x", "1"], "--run.steps.x: steps is a value, not a table of keys"),
        (["--run", "1"], "--run: expected a section of keys"),
        (["--run.trackers", "[tensorboard]"], "--run.trackers: [tensorboard] is not valid TOML"),
        (["--precision.recipe", "fp8_unified", "--correction.preset", "none"],
         "--precision.recipe: precision.recipe"),
        (["--rollout.max_new_tokens", "30"], "--rollout.max_new_tokens: train.row_tokens = 32 cannot hold"),
        (["--train.row_tokens", "20"], "--train.row_tokens: train.row_tokens = 20 cannot hold"),
    ],
)
def test_bad_override(write, words, says):
    assert says in refusal(write(GOOD), *words)


def test_config_errors_load_neither_jax_nor_torch(write):
    code = (
        "import sys; from jaxfp8rl.config.toml import load_config\n"
        "try: load_config(sys.argv[1], ['--optim.lrr', '1'])\n"
        "except ValueError: pass\n"
        "sys.exit(bool({'jax', 'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, write(GOOD)], check=True)
