"""The pages about precision say what the code does and what was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jaxfp8rl.precision.recipe import RECIPES

ROOT = Path(__file__).parents[3]
GUIDE, NOTEBOOK = ((ROOT / "docs" / name).read_text(encoding="utf-8")
                   for name in ("precision.md", "notebook_precision.md"))
RESULTS, MISMATCH = (json.loads((ROOT / "benchmarks" / "results"
                                 / f"{name}.json").read_text(encoding="utf-8"))
                     for name in ("precision_errors", "mismatch"))


def cells(line: str) -> list[str]:
    return [c.strip() for c in line.strip("|\n").split(" | ")]


def test_every_recipe_has_its_column():
    header = next(cells(line) for line in NOTEBOOK.splitlines() if line.startswith("| tensor |"))
    assert set(header[1:6]) == {f"`{name}`" for name in RECIPES}


@pytest.mark.parametrize("subject", RESULTS["linears"])
def test_the_errors_are_those_of_the_benchmark(subject):
    """The tables of formats, one a subject: forward, dgrad, wgrad in percent; 1 - cosine in units of 1e-3."""
    found = {(r["case"], r["metric"]): r["ours"] for r in RESULTS["rows"]}
    table = NOTEBOOK.split(f"**{subject}**")[1].split("\n\n")[1].splitlines()[2:]
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


def test_the_guide_has_every_recipe_and_the_mismatch_of_the_benchmark():
    for name in RECIPES:
        assert f"| `{name}` |" in GUIDE, name
    found = {r["case"]: r["ours"] for r in MISMATCH["rows"] if r["metric"] == "mismatch/k3"}
    table = GUIDE.split("| recipe | `mismatch/k3`, BF16 cache")[1].split("\n\n")[0].splitlines()[2:]
    for recipe, *numbers in map(cells, table):
        for cache, number in zip(("BF16", "FP8"), numbers, strict=True):
            measured = found[f"{recipe.strip('`')}, {cache} KV"]
            assert float(number) == pytest.approx(measured, rel=0.1), (recipe, cache)


@pytest.mark.parametrize("subject,columns", [("demo model", (1, 2)), ("SmolLM2-135M", (3, 4))])
def test_the_guides_errors_are_the_notebooks(subject, columns):
    rows = [cells(line) for line in NOTEBOOK.split(f"**{subject}**")[1].split("\n\n")[1].splitlines()[2:]]
    notebook = {name: numbers[-2:] for name, *numbers in rows}
    table = GUIDE.split("| recipe | demo model: layer")[1].split("\n\n")[0].splitlines()[2:]
    for row in map(cells, table):
        name = row[0].replace("`", "").replace('wgrad_inputs = "128x128"', "wgrad's inputs in 128x128")
        assert [row[c] for c in columns] == notebook[name], row


@pytest.mark.parametrize("text", [GUIDE, NOTEBOOK], ids=["guide", "notebook"])
def test_files_it_names_exist(text):
    for path in re.findall(r"`([\w/]+\.(?:py|json))`", text):
        assert (ROOT / path).exists() or (ROOT / "jaxfp8rl" / path).exists(), path
