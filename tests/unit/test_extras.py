"""The extras as users write them resolve to releases that were tested, or one series above, and import in
clean environments.

`make extras` runs this. It asks the package index, so its answers are of the day. docs/notebook_versions.md
records one day's; `python tests/unit/test_extras.py` prints that table.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxfp8rl import tested
from jaxfp8rl.tested import CUDA, TESTED

ROOT = Path(__file__).resolve().parents[2]
UV = Path(sys.executable).parent / "uv"
EXTRAS = ("cuda13,vllm", "cuda13", "cuda12", "cuda12,vllm", "vllm", "tasks", "gguf", "trackers", "dev", "")
# Small enough to install: the extra, and what it is for.
IMPORTS = {
    "": "jaxfp8rl, bridges, pallas_kernels, jaxfp8rl.cli.main",
    "tasks": "reasoning_gym, math_verify, transformers, pyarrow, jaxfp8rl.data.tasks",
    "trackers": "tensorboardX, wandb, jaxfp8rl.monitors.trackers",
    "dev": "pytest, pytest_timeout, xdist, hypothesis, ruff",
}
PLUGINS = tuple(f"jax-cuda{n}-plugin" for n in CUDA)
SHOWN = ("jax", *PLUGINS, "flax", "orbax-checkpoint", "transformers", "torch", "vllm", "cuda-toolkit")


def uv(*words: str) -> str:
    """The output of uv, without settings or packages of this environment."""
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run([UV, *words], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def resolved(extras: str, *options: str) -> dict[str, str]:
    """package -> version that `pip install ".[extras]"` takes today."""
    chosen = [word for extra in filter(None, extras.split(",")) for word in ("--extra", extra)]
    text = uv("pip", "compile", "--quiet", "--no-header", "--no-annotate", "--python-version", "3.12",
              "pyproject.toml", *chosen, *options)
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.M))


def series_above(row: tested.Tested, version: str) -> int:
    """How many series `version` lies above the newest that was tested; 0 for a tested or an older one."""
    *head, last = row.series(version)
    *same, newest = row.series(row.newest)
    return max(0, last - newest) if head == same else 99 * (head > same)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A copy of what is shipped, so that no build folder is left in the checkout."""
    copy = tmp_path_factory.mktemp("source") / "jaxfp8rl"
    for name in ("jaxfp8rl", "pallas_kernels", "bridges", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("extras", EXTRAS)
def test_extras_resolve_to_what_was_tested_or_one_series_above(extras):
    found = resolved(extras)
    above = {row.package: series_above(row, found[row.package]) for row in TESTED if row.package in found}
    assert {"jax", "flax", "optax", "orbax-checkpoint"} <= above.keys()
    assert max(above.values()) <= 1, {name: found[name] for name, n in above.items() if n > 1}
    assert [p for p in PLUGINS if p in found] == [p for n, p in zip(CUDA, PLUGINS) if f"cuda{n}" in extras]
    assert all(found[p] == found["jax"] for p in PLUGINS if p in found)


@pytest.mark.slow
def test_the_measured_releases_can_be_installed():
    """`pip install -c requirements/h200.txt`, as README says."""
    found = resolved("cuda13,vllm,tasks,gguf", "--constraint", "requirements/h200.txt")
    assert {row.package: found[row.package] for row in TESTED if row.gpu} == {
        row.package: row.gpu for row in TESTED if row.gpu}


@pytest.mark.slow
@pytest.mark.parametrize("extra", IMPORTS)
def test_an_extra_imports_in_a_clean_environment(extra, source, tmp_path):
    uv("venv", "--quiet", "--python", sys.executable, str(tmp_path / "clean"))
    python = tmp_path / "clean" / "bin" / "python"
    uv("pip", "install", "--quiet", "--python", str(python), f"{source}[{extra}]" if extra else str(source))
    code = (f"import {IMPORTS[extra]}, sys\nfrom jaxfp8rl.config.toml import load_config, presets\n"
            "print(len([load_config(name) for name in presets()]) > 5, 'torch' in sys.modules)")
    done = subprocess.run([python, "-P", "-c", code], capture_output=True, text=True, cwd=tmp_path,
                          env={"JAX_PLATFORMS": "cpu", "PATH": os.environ["PATH"]})
    assert done.stdout.strip() == "True False", done.stderr


def table() -> str:
    """What every extra resolves to today, as a table for docs/notebook_versions.md."""
    rows = [f"| `{f'.[{extras}]' if extras else '.'}` | "
            + ", ".join(f"{name} {found[name]}" for name in SHOWN if name in found) + " |"
            for extras in EXTRAS for found in [resolved(extras)]]
    head = f"| extras | resolved on {datetime.date.today()} |\n|---|---|\n"
    return head + "\n".join(rows)


if __name__ == "__main__":
    print(table())
