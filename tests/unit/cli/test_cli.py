"""The command line as a user meets it: exit codes, where messages go, and how quickly it answers."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import types

import pytest

from bridges.api import EngineUnhealthy
from jaxfp8rl.checkpoint.store import seal
from jaxfp8rl.cli import main
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.errors import GateFailed, NonFiniteStep, UserError, check_writable

CONFIG = """\
[run]
dir = "runs/x"
steps = 3
[model]
tokenizer = "chars:0123456789+="
[model.config]
architectures = ["Qwen3ForCausalLM"]
vocab_size = 128
hidden_size = 128
intermediate_size = 256
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 64
max_position_embeddings = 64
[task]
kind = "arithmetic"
max_prompt_tokens = 16
[rollout]
prompts_per_step = 4
samples_per_prompt = 2
max_new_tokens = 8
[train]
row_tokens = 32
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def trained(monkeypatch):
    """What the loop was called with, in place of the loop."""
    calls = []
    module = types.ModuleType("jaxfp8rl.training.loop")
    module.train = lambda cfg, resume, fork_of: calls.append((cfg, resume, fork_of))
    monkeypatch.setitem(sys.modules, "jaxfp8rl.training.loop", module)
    return calls


def test_train_passes_config_and_flags(config, trained):
    assert main.main(["train", "--optim.lr", "1e-3", config, "--resume", "--run.dir=runs/y", "--fork",
                      "runs/x@3"]) == 0
    ((cfg, resume, fork_of),) = trained
    assert cfg == load_config(config, ["--optim.lr", "1e-3", "--run.dir",
                                       "runs/y"]) and resume is True and fork_of == "runs/x@3"


def test_a_run_is_resumed_as_it_was_begun_but_for_what_is_typed(config, trained, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    begun = load_config(config, ["--run.dir", str(run), "--optim.lr", "3e-4"])
    (run / "config.toml").write_text(dump_config(begun))
    assert main.main(["train", config, "--run.dir", str(run), "--resume", "--run.steps",
                      "5"]) == 2 and trained == []
    said = capsys.readouterr().err
    assert "\n  optim.lr: 0.0003 -> " in said and "run.steps" not in said
    assert f"jaxfp8rl train {run} --resume" in said
    assert main.main(["train", config, f"--run.dir={run}", "--resume", "--optim.lr", "1e-3"]) == 0
    assert main.main(["train", str(run), "--resume"]) == 0
    moved = str(run.rename(tmp_path / "moved"))
    assert main.main(["train", moved, "--resume", "--run.steps=9"]) == 0
    found = [(c.optim.lr, c.run.steps, c.run.dir) for c, *_ in trained]
    assert found == [(1e-3, 3, str(run)), (3e-4, 3, str(run)), (3e-4, 9, moved)]


@pytest.mark.parametrize("what, goes_on", [
    ("last", False), ("older", True), ("damaged", True), ("undrawn", True), ("longer", True), ("other", None),
])
def test_a_finished_run_has_nothing_to_resume(what, goes_on, config, trained, tmp_path, capsys):
    """Unless its checkpoint is not what was written, it was killed before its plot, or it is to go further.
    With settings that it may not be resumed with it is refused still."""
    run = tmp_path / "run"
    step = run / "checkpoints" / ("2" if what == "older" else "3")
    step.mkdir(parents=True)
    (step / "state").write_text("x")
    seal(step)
    if what != "undrawn":
        (run / "plot.png").write_bytes(b"")
    if what == "damaged":
        (step / "state").write_text("y")
    (run / "config.toml").write_text(dump_config(load_config(config, ["--run.dir", str(run)])))
    words = {"longer": ["--run.steps", "9"], "other": ["--run.seed", "9"]}.get(what, [])
    assert main.main(["train", str(run), "--resume", *words]) == (2 if goes_on is None else 0)
    assert len(trained) == bool(goes_on)
    assert ("nothing to do: step 3 of 3 is done; raise --run.steps" in capsys.readouterr().out) == (
        goes_on is False)


@pytest.mark.parametrize("code, way_on", [
    (errno.EACCES, "choose a path"), (errno.EROFS, "choose a path"), (errno.ENOSPC, "free disk space"),
    (errno.EDQUOT, "free disk space"),
])
def test_a_disk_that_takes_nothing_is_no_bug(code, way_on, config, monkeypatch, capsys):
    def train(cfg, resume, fork_of):
        raise OSError(code, os.strerror(code), "runs/x/.lock")

    monkeypatch.setitem(sys.modules, "jaxfp8rl.training.loop", types.SimpleNamespace(train=train))
    assert main.main(["train", config]) == 2
    assert capsys.readouterr().err.startswith(
        f"jaxfp8rl: runs/x/.lock: {os.strerror(code)}\n  next step: {way_on}")


def test_another_error_of_the_system_keeps_its_trace(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxfp8rl.training.loop",
                        types.SimpleNamespace(train=lambda *_, **__: open("nowhere/x")))
    with pytest.raises(FileNotFoundError):
        main.main(["train", config])


@pytest.fixture
def full(monkeypatch):
    """No disk takes anything."""

    def refuse(dir):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)


def test_a_place_is_tried_before_what_takes_long(full, config, tmp_path, monkeypatch, capsys):
    """The work itself is not there to be begun."""
    monkeypatch.chdir(tmp_path)
    for module, name in (("jaxfp8rl.cli.bench", "run_bench"), ("bridges.sources.gguf_import", "import_gguf"),
                         ("jaxfp8rl.training.sft", "load_data"),
                         ("jaxfp8rl.checkpoint.export", "load_trained"),
                         ("jaxfp8rl.evaluate.pass_at_k", "config_of")):
        monkeypatch.setattr(f"{module}.{name}", lambda *_, **__: pytest.fail("begun"))
    (tmp_path / "run").mkdir()
    for words in (["bench", "corrections_time"], ["import-gguf", "out"], ["sft", config, "--sft.steps", "1"],
                  ["export", "run", "out"], ["eval", "run"], ["eval", "demo", "--out", "found.json"]):
        assert main.main(words) == 2, words
        said = capsys.readouterr().err
        assert f"cannot write to {tmp_path}" in said and os.strerror(
            errno.ENOSPC) in said and "make room" in said


def test_a_place_below_a_file_is_none(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file: Not a directory"):
        check_writable(tmp_path / "file" / "out")
    check_writable(tmp_path / "not" / "there")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("name", ["7", "true", "1e3", "[a]", 'a"b', "2026-01-01"])
def test_a_run_directory_may_have_a_name_that_is_no_word_of_toml(
        name, config, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    begun = load_config(config)
    (tmp_path / name / "config.toml").write_text(dump_config(begun))
    assert main.main(["train", name, "--resume"]) == 0
    ((cfg, *_),) = trained
    assert cfg == begun.model_copy(update={"run": begun.run.model_copy(update={"dir": name})})


def test_config_prints_what_loads_back(config, capsys, tmp_path):
    assert main.main(["config", config, "--model.config.seed", "-7"]) == 0
    again = tmp_path / "again.toml"
    again.write_text(capsys.readouterr().out)
    assert load_config(str(again)) == load_config(config, ["--model.config.seed", "-7"])


def test_dry_run_shows_config_and_memory_and_trains_nothing(config, trained, capsys):
    assert main.main(["train", config, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "[rollout]" in out and "master weights" in out and out.count("  total\n") == 1
    assert main.main(["train", config, "--dry-run", "--sft.steps", "1"]) == 0
    assert "memory of the warm start" in (out := capsys.readouterr().out) and out.count("  total\n") == 2
    assert main.main(["sft", config, "--dry-run", "--sft.steps", "1"]) == 0
    assert "memory of the warm start" in (out := capsys.readouterr().out) and out.count("  total\n") == 1
    assert trained == []


@pytest.mark.parametrize(
    "words, says",
    [
        (["train", "nowhere.toml"], "nowhere.toml: no such file"),
        (["train", "CONFIG", "--optim.lrr", "1"], '--optim.lrr: unknown key (did you mean "lr"?)'),
        (["train", "CONFIG", "--lr", "1"], '--lr: unknown key: "lr" belongs to optim.lr or sft.lr'),
        (["train", "CONFIG", "--temprature=1"], '(did you mean "--rollout.temperature"?)'),
        (["train", "CONFIG", "--run-dir", "x"],
         '--run-dir: unknown section or key (did you mean "--run.dir"?)'),
        (["trian", "CONFIG"], 'trian: no such command (did you mean "train"?)'),
        (["check", "CONFIG"], "next step: jaxfp8rl train CONFIG --dry-run"),
        (["train", "FOLDER"], "FOLDER is a folder without config.toml: no run"),
        (["sft", "RUN"], "RUN is a run directory\n  next step: give RUN/config.toml"),
        (["train", "CONFIG", "--dry-run", "--task.options.operand", "3"],
         'no option "operand" (did you mean "operands"?)'),
        (["train", "CONFIG", "--precision.recipe", "fp8"],
         'jaxfp8rl: --precision.recipe: "fp8" is no recipe (here it is precision.recipe = "fp8_unified" '
         '(engine and learner) or '
         '"fp8_rollout" (the engine alone))\n'
         "  next step: fp8_unified is the usual one (docs/precision.md)"),
        (["train", "CONFIG", "more"], "more: unexpected argument"),
        (["doctor", "--optim.lr", "1"], "`jaxfp8rl doctor` reads no config"),
        (["train", "CONFIG", "--optim.lr"], "--optim.lr: a value is missing"),
    ],
)
def test_wrong_input_leaves_with_2_and_no_trace(words, says, config, trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "config.toml").write_text(CONFIG)
    assert main.main([config if w == "CONFIG" else w for w in words]) == 2
    out, err = capsys.readouterr()
    assert says in err and "next step:" in err and "Traceback" not in err and out == "" and trained == []


@pytest.mark.parametrize("error, code", [(GateFailed("gap", "look"), 3), (NonFiniteStep("nan"), 4),
                                         (EngineUnhealthy("bad"), 5),
                                         (KeyboardInterrupt(), 130)])
def test_exit_codes(error, code, config, monkeypatch, capsys):
    def train(cfg, resume, fork_of):
        raise error

    monkeypatch.setitem(sys.modules, "jaxfp8rl.training.loop", types.SimpleNamespace(train=train))
    assert main.main(["train", config]) == code
    assert capsys.readouterr().err.startswith("jaxfp8rl: ")


def test_a_bug_keeps_its_trace(config, monkeypatch):
    monkeypatch.setitem(sys.modules, "jaxfp8rl.training.loop",
                        types.SimpleNamespace(train=lambda cfg, resume, fork_of: 1 / 0))
    with pytest.raises(ZeroDivisionError):
        main.main(["train", config])


@pytest.mark.parametrize("words", [["--help"], ["config", "CONFIG"], ["train", "CONFIG", "--optim.lrr", "1"]])
def test_quick_answers_load_nothing_heavy(words, config):
    """What looks at the combinations of a loss loads jax, which its objectives are written in."""
    code = (
        "import sys; from jaxfp8rl.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'vllm', 'transformers', 'matplotlib'} | (set() if 'config' in sys.argv "
        "else {'jax'})\n"
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    words = [config if w == "CONFIG" else w for w in words]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout or done.stderr


def test_help_teaches_every_command(capsys):
    for words in (["--help"], []):
        with pytest.raises(SystemExit) as e:
            main.main(words)
        out = capsys.readouterr().out
        assert e.value.code == 0
        assert all(word in out for word in ("train", "sft", "doctor", "config", "import-gguf", "--dry-run",
                                            "--resume"))


@pytest.mark.parametrize("command", ["train", "eval", "config", "report", "sft"])
def test_the_help_of_a_command_has_its_own_examples_alone(command, capsys):
    with pytest.raises(SystemExit):
        main.main([command, "--help"])
    examples = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  jaxfp8rl ")]
    assert {line.split()[1] for line in examples} == {command}


def test_memory_plan_counts_the_tensors(config):
    """The counted rows against the arrays themselves."""
    import jax

    from jaxfp8rl.memory.plan import memory_plan
    from jaxfp8rl.models.config import ModelConfig
    from jaxfp8rl.models.hf_names import empty_params
    from jaxfp8rl.optim.adamw import make_optimizer
    from jaxfp8rl.optim.guard import init_state

    cfg = load_config(config, ["--precision.recipe", "fp8_unified", "--rollout.kv_cache", "fp8"])
    model = ModelConfig.from_hf(cfg.model.config)
    plan = {what.split(",")[0].split(" (")[0]: size for what, size in memory_plan(cfg, model)}
    state = init_state(jax.tree.map(jax.numpy.asarray, empty_params(model, "float32")),
                       make_optimizer(cfg.optim, 1))
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree) if x.ndim)
    assert plan["master weights"] == size(state.params) and plan["Adam's two moments"] == size(
        state.opt_state)
    # k and v, layers, pages: two and one for a prompt's end for each of 8 rows, and two; slots, heads, width,
    # a byte
    assert plan["engine: keys and values"] == 2 * 2 * (8 * 3 + 2) * 16 * 2 * 64
    assert plan["engine: weights"] < plan["master weights"] / 2
    with_vllm = memory_plan(load_config(config, ["--rollout.engine", "vllm"]), model)
    assert not any(what.startswith("engine") for what, _ in with_vllm)
