"""`jaxfp8rl bench`: what it lists, what it refuses, and one benchmark from the command to its JSON, table and
picture."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys

import jax
import pytest

from benchmarks import common
from benchmarks.common import row, table
from benchmarks.processes import answered
from jaxfp8rl.cli import bench, main
from jaxfp8rl.errors import OutOfMemory


@pytest.fixture(autouse=True)
def own_process(monkeypatch):
    """The command sets what is its process's own."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(common, "RESULTS", common.RESULTS)


def test_the_list_says_of_every_benchmark_what_for_and_what_it_needs(capsys):
    assert main.main(["bench"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    files = {path.stem: path.read_text() for path in bench.FOLDER.glob("*.py")}
    commands = {name for name, text in files.items() if "\ndef main(" in text}
    parts = {"common", "estimator_plots", "estimator_world", "moe_tables", "processes", "trl_children",
             "trl_settings"}
    assert set(bench.benchmarks()) == commands and files.keys() - commands == parts
    for found in bench.benchmarks().values():
        assert found.purpose.endswith(".") and not found.needs.startswith(
            "what"), f"benchmarks/{found.name}.py: see CONTRIBUTING"
        assert f"{found.name} {found.purpose} Needs {found.needs}." in out


def test_the_list_loads_nothing_heavy():
    code = ("import sys; from jaxfp8rl.cli.main import main; assert main(['bench']) == 0\n"
            "print(sorted({'jax', 'torch', 'vllm', 'matplotlib'} & sys.modules.keys()))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("\n[]\n"), done.stdout[-300:] + done.stderr


OURS = ("benchmarks", "bridges", "jaxfp8rl", "pallas_kernels")


def unbound(module) -> list[str]:
    """Calls in a module of what is ours, whose arguments do not suit its signature."""
    found = []
    for call in (n for n in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(n, ast.Call)):
        first, *rest = ast.unparse(call.func).split(".")
        try:
            called = functools.reduce(getattr, rest, vars(module)[first])
            signature = inspect.signature(called)
        # not of the module's namespace, or not of Python
        except (AttributeError, KeyError, TypeError, ValueError):
            continue
        if not str(getattr(called, "__module__", "")).startswith(OURS):
            continue
        open_ended = any(isinstance(a, ast.Starred)
                         for a in call.args) or any(k.arg is None for k in call.keywords)
        bind = signature.bind_partial if open_ended else signature.bind
        try:
            bind(*(a for a in call.args if not isinstance(a, ast.Starred)),
                 **{k.arg: k for k in call.keywords if k.arg})
        except TypeError as e:
            found.append(f"line {call.lineno}, {ast.unparse(call.func)}: {e}")
    return found


@pytest.mark.parametrize("name", [path.stem for path in sorted(bench.FOLDER.glob("*.py"))])
def test_what_runs_on_a_gpu_alone_calls_things_as_they_are(name):
    assert unbound(importlib.import_module(f"benchmarks.{name}")) == []


def test_a_call_that_no_longer_suits_is_found():
    stale = type(sys)("stale")
    exec("import jaxfp8rl.training.start as start", vars(stale))
    source = ("start.init_train_state(parts, run)\nstart.init_train_state(parts, run, stop)\n"
              "start.init_train_state(*parts)\nprint(1, 2, 3)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "getsource", lambda _: source)
        assert unbound(stale) == ["line 1, start.init_train_state: missing a required argument: 'stop'"]


@pytest.mark.parametrize(
    "words, says",
    [
        (["gem"], 'no benchmark "gem" (did you mean "gemm"?)'),
        (["nothing-like-it"], 'no benchmark "nothing-like-it"\n  next step: `jaxfp8rl bench` lists them'),
        (["--plot", "x.png", "gemm"], "--plot: unexpected argument"),
        (["gemm", "--tokens", "4096"],
         "gemm needs a GPU; torch and vLLM for all its yardsticks: there is no NVIDIA GPU here"),
        (["publish"], "benchmark publish needs a GPU and vLLM: there is no NVIDIA GPU here"),
        (["attention_bits"],
         "needs a Hopper GPU, and vLLM for FlashAttention 3: there is no NVIDIA GPU here"),
    ],
)
def test_what_cannot_run_is_said_with_a_next_step(words, says, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main.main(["bench", *words]) == 2
    out, err = capsys.readouterr()
    assert says in err and "next step:" in err and out == ""


def test_what_a_benchmark_needs_is_said_in_words_that_are_understood(monkeypatch):
    """On a machine that has nothing those are offered that need nothing, in whatever words."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    for found in bench.benchmarks().values():
        first, *rest = re.split(r", and | and |, ", found.needs.partition(";")[0])
        if not first.startswith("the runs of "):
            assert first in ("no GPU", "a GPU", "a Hopper GPU", "vLLM"), f"benchmarks/{found.name}.py"
            assert {word.partition(" ")[0]
                    for word in rest} <= {"vLLM", "nvcc"}, f"benchmarks/{found.name}.py"
            assert bool(found.missing()) == (first != "no GPU" or bool(rest)), f"benchmarks/{found.name}.py"


def test_what_is_missed_is_named(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name if name != "nvcc" else None)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: True)
    assert bench.benchmarks()["engine_products"].missing() == "nvcc"
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.setattr(bench.importlib.util, "find_spec", lambda name: None)
    assert {name: bench.benchmarks()[name].missing() for name in ("gemm", "publish", "kv_scales")} == {
        "gemm": "", "publish": "vLLM", "kv_scales": ""}


def test_an_installed_package_has_none_and_says_where_they_are(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "benchmarks")
    for words in (["bench"], ["bench", "gemm"]):
        assert main.main(words) == 2
        assert "clone the repository and run `pip install -e .` there" in capsys.readouterr().err


def test_its_own_help_and_its_own_mistakes(capsys):
    for words, code in ((["--help"], 0), (["--calls", "many"], 2)):
        with pytest.raises(SystemExit) as e:
            main.main(["bench", "corrections_time", *words])
        assert e.value.code == code
    out, err = capsys.readouterr()
    assert "usage: jaxfp8rl bench corrections_time" in out and "--plot FILE.png" in out
    assert "invalid int value: 'many'" in err


@pytest.mark.parametrize("words, says", [([], "default: corrections_time.json"),
                                         ([bench.COMMIT], "benchmarks/results/corr")])
def test_where_a_result_goes_is_said(words, says, capsys):
    with pytest.raises(SystemExit):
        main.main(["bench", "corrections_time", "--help", *words])
    assert says.replace(" ", "") in "".join(capsys.readouterr().out.split()), "wherever a line is broken"


def test_a_benchmark_writes_json_table_and_picture(tmp_path, monkeypatch, capsys):
    out, plot = tmp_path / "corrections_time.json", tmp_path / "plot.png"
    monkeypatch.chdir(tmp_path)  # a trial run must not replace what is committed
    words = ["--presets", "token_tis", "--rows", "2", "--tokens", "128", "--calls", "1", "--plot", str(plot)]
    assert main.main(["bench", "corrections_time", *words]) == 0
    result, lines = json.loads(out.read_text()), capsys.readouterr().out.splitlines()
    assert result["name"] == "corrections_time" and result["device"] == "cpu" and "jax" in result["versions"]
    assert [r["metric"]
            for r in result["rows"]] == ["none", "token_tis"] and all(r["ratio"] > 0 for r in result["rows"])
    assert lines[:-1] == table(result["rows"]).splitlines() and lines[-1].endswith(str(out))
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_table_is_in_line_and_names_a_case_once():
    rows = [row("small", "time", "ms", 0.5, 1.0, "other", True),
            row("small", "rate", "GB/s", 12345.6, 0.0, "none")]
    assert table([*rows, row("large", "time", "ms", 2.0, 1.0, "other", True)]) == (
        "case   metric    ours  yardstick  ratio  unit  beside\n"
        "small  time       0.5          1      2  ms    other\n"
        "       rate    12,346          0      -  GB/s  none\n"
        "large  time         2          1    0.5  ms    other"
    )


def test_memory_that_runs_out_is_explained_by_what_was_held(monkeypatch, capsys):
    """Of a benchmark in this process, and of the process of a case."""
    out = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 24.50GiB."

    def main_() -> None:
        raise jax.errors.JaxRuntimeError(out)

    monkeypatch.setattr(importlib.import_module("benchmarks.corrections_time"), "main", main_)
    assert main.main(["bench", "corrections_time"]) == 6
    said = capsys.readouterr().err
    assert re.search(r"24.50  asked for when it failed\n +[\d.]+  in all\n  " + re.escape(out), said)
    assert "next step: `jaxfp8rl bench corrections_time --help` lists the options" in said
    with pytest.raises(OutOfMemory, match="the device's memory ran out; it held:"):
        answered(["out.json"], main_)


def test_another_error_of_a_benchmark_stays_what_it_is(monkeypatch):
    def main_() -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(importlib.import_module("benchmarks.corrections_time"), "main", main_)
    with pytest.raises(RuntimeError, match="^something else$"):
        main.main(["bench", "corrections_time"])
