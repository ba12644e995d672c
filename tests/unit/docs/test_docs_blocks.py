"""Every block of README and docs does what it says: Python is run, TOML loads, commands exist with all their
options.

A command is not run to its end (`make demo` takes minutes, others want a GPU) but up to where it would start:
the command line's own parser and config reader take its words. What a block needs around it stands in AROUND,
what another test runs in ELSEWHERE.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from jaxfp8rl.cli.main import main, parse
from jaxfp8rl.config.toml import load_config

pytestmark = pytest.mark.usefixtures("quick_compile")

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = ("jaxfp8rl", "make", "pip", "python", "export", "bash", "cd", "vllm")
# (page, language): the test that runs these blocks, because they need more than a moment.
ELSEWHERE = {
    ("swap_the_learner.md", "python"): "tests/bridges/test_swap_the_learner.py",
    ("your_jax_model.md", "python"): "tests/bridges/test_tunix_vllm.py",
    ("tinker.md", "python"): "tests/unit/serving/test_tinker_client.py",
    ("tasks.md", "python"): "tests/unit/docs/test_docs_metrics.py",
    ("corrections.md", "toml"): "tests/unit/docs/test_docs_corrections.py",
    ("datasets.md", "toml"): "tests/unit/data/test_layouts.py",
}
ARRAYS = """
import jax, jax.numpy as jnp
normal = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
"""
# Pages whose Python starts engines that need a model; their imports are run here, and what they call in
# tests/bridges/.
IMPORTS_ALONE = {"remote_engine.md", "vllm_server.md"}
# page: what its Python takes for granted.
AROUND = {
    "attention.md": ARRAYS + "segment_ids = jnp.array([1] * 10 + [0] * 6)\n"
    "q, k, v = normal(0, 16, 4, 64), normal(1, 16, 2, 64), normal(2, 16, 2, 64)\n",
    "decode_attention.md": ARRAYS + "q = normal(0, 2, 4, 64)\n"
    "k_pages, v_pages = normal(1, 6, 16, 2, 64), normal(2, 6, 16, 2, 64)\n"
    "block_table, lengths = jnp.array([[0, 1, 2], [3, 4, 5]]), jnp.array([20, 40])\nk_scale = v_scale "
    "= jnp.ones(2)\n",
}


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for m in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.S | re.M):
            found.append(Block(page.name, text.count("\n", 0, m.start()) + 2, *m.groups()))
    return found


def of(language: str) -> list:
    chosen = [b for b in blocks() if b.language == language and (b.page, language) not in ELSEWHERE]
    return [pytest.param(b, id=f"{b.page}:{b.line}") for b in chosen]


def commands() -> list:
    """Each command of each bash block; a line that ends with a backslash goes on."""
    lines = [(b, line) for b in blocks() if b.language == "bash"
             for line in b.text.replace("\\\n", " ").splitlines()]
    return [pytest.param(line, id=f"{b.page}: {line[:60]}") for b, line in lines
            if line.split("#")[0].strip()]


def test_every_block_has_a_language_that_is_tested():
    assert {b.language for b in blocks()} <= {"", "bash", "python", "toml", "mermaid"}
    for b in blocks():  # a drawing or a formula has none
        first = b.text.split()[0] if b.text.split() else ""
        assert b.language or first not in COMMANDS, f"{b.page}:{b.line} is a command: mark it as bash"


@pytest.mark.parametrize("page,test", [(page, test) for (page, _), test in ELSEWHERE.items()])
def test_what_is_run_elsewhere_is(page, test):
    assert page in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("block", of("python"))
def test_python_runs(block):
    scope = {"__name__": block.page}
    exec(AROUND.get(block.page, ""), scope)
    tree = ast.increment_lineno(ast.parse(block.text), block.line - 1)
    if block.page in IMPORTS_ALONE:
        tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert tree.body
    exec(compile(tree, block.page, "exec"), scope)


@pytest.mark.parametrize("block", of("toml"))
def test_toml_loads_in_place_of_the_demos_sections(block, tmp_path):
    named = tomllib.loads(block.text).keys()
    demo = (ROOT / "configs" / "demo.toml").read_text()
    sections = [s for s in re.split(r"^(?=\[)", demo, flags=re.M) if s.startswith("[")]
    kept = [s for s in sections if re.match(r"\[(\w+)", s)[1] not in named]
    (tmp_path / "run.toml").write_text("".join(kept) + "\n" + block.text)
    load_config(str(tmp_path / "run.toml"))


@pytest.mark.parametrize("line", commands())
def test_a_command_is_understood(line, tmp_path, monkeypatch):
    words = shlex.split(line, comments=True)
    while re.match(r"[A-Z_]+=", words[0]):  # JAX_PLATFORMS=cuda python ...
        words.pop(0)
    shells = dict.fromkeys(("export", "source"), lambda _: None)
    {"jaxfp8rl": jaxfp8rl, "make": make, "pip": pip, "python": python, "hf": hf, "vllm": vllm,
     **shells}[words[0]](words[1:])


def jaxfp8rl(words: list[str]) -> None:
    """Parsed, and its config read with the overrides; CONFIG, and a run's, stand for any."""
    args, overrides = parse(["demo" if w in ("CONFIG", "mine.toml") else w for w in words])
    if getattr(args, "config", None):
        load_config("demo" if args.config.startswith("runs/") else args.config, overrides)


def hf(words: list[str]) -> None:
    """What is downloaded goes where a shipped config looks for it."""
    download, name, option, folder = words
    assert (download, option) == ("download", "--local-dir") and name.rpartition("/")[2] == Path(folder).name
    assert folder in {load_config(path.stem).model.path for path in (ROOT / "configs").glob("*-h200.toml")}


def vllm(words: list[str]) -> None:
    """Its options, and the values that are ours, are those of the server that a test starts."""
    run = (ROOT / "tests/bridges/stock_server.py").read_text()
    assert words[0] == "serve"
    assert [w for w in words[2:] if re.match("--|[{]|bridges", w) and f'"{w}"' not in run
            and f"'{w}'" not in run] == []


def make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert set(words) <= set(targets)


def pip(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    for word in words[1:]:
        assert set(re.findall(r"[\w-]+", (re.search(r"\[(.*)\]", word) or "  ")[1])) <= extras.keys()


def python(words: list[str]) -> None:
    """An example is one that is run (tests/unit/test_examples.py); a module's own help knows every option."""
    if words[0].startswith("examples/"):
        assert words[1:] == [] and (ROOT / words[0]).exists()
        return
    if words[0] == "-c":
        compile(words[1], "-c", "exec")
        return
    assert words[0] == "-m", words
    module, options = words[1], {w for w in words[2:] if w.startswith("--")}
    if module == "pytest":
        markers = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"][
            "markers"]
        assert words[2] == "-m" and words[3] in {m.partition(":")[0] for m in markers}
        return
    done = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=ROOT,
                          check=True)
    assert options <= set(re.findall(r"--[\w-]+", done.stdout))


def test_the_commands_that_only_print_are_run(capsys):
    for words in (["config", "demo"], ["train", "demo", "--dry-run"], ["bench"]):
        assert main(words) == 0
    assert "[rollout]" in capsys.readouterr().out
