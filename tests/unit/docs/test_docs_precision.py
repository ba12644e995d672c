"""docs/precision.md says what the code does and what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jaxfp8rl.precision.recipe import RECIPES

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "precision.md").read_text(encoding="utf-8")
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "precision_errors.json").read_text(encoding="utf-8"))


def cells(line: str) -> list[str]:
    return [c.strip() for c in line.strip("|\n").split(" | ")]


def test_every_recipe_has_its_column():
    header = next(cells(line) for line in TEXT.splitlines() if line.startswith("| tensor |"))
    assert set(header[1:6]) == {f"`{name}`" for name in RECIPES}


@pytest.mark.parametrize("subject", RESULTS["linears"])
def test_the_errors_are_those_of_the_benchmark(subject):
    """The tables of formats, one a subject: forward, dgrad, wgrad in percent; 1 - cosine in units of 1e-3."""
    found = {(r["case"], r["metric"]): r["ours"] for r in RESULTS["rows"]}
    table = TEXT.split(f"**{subject}**")[1].split("\n\n")[1].splitlines()[2:]
    assert len(table) == len(RESULTS["linears"][subject]) + 1  # keys and values come with the update alone
    for name, *numbers in map(cells, table):
        keys = [(f"{subject}, one layer: {name}", m)
                for m in LAYER] + [(f"{subject}, one update: {name}", UPDATE)]
        factors = [100, 100, 100, 1000, 1000]
        for key, factor, number in zip(keys, factors, numbers, strict=True):
            assert (key in found) == (number != "-"), key
            if number != "-":
                assert float(number) == pytest.approx(factor * found[key], rel=0.02, abs=0.0051), key


LAYER = [f"{product}, relative error" for product in ("forward", "dgrad",
                                                      "wgrad")] + ["1 - cosine, mean gradient"]
UPDATE = "1 - cosine, whole gradient"


def test_files_it_names_exist():
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert target.startswith("http") or (ROOT / "docs" / target).exists(), target
    for path in re.findall(r"`([\w/]+\.(?:py|json))`", TEXT):
        assert (ROOT / path).exists() or (ROOT / "jaxfp8rl" / path).exists(), path
