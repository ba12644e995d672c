"""The API pages show every name that the packages export."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

PAGES = "".join(page.read_text(encoding="utf-8")
                for page in (Path(__file__).parents[3] / "docs").glob("api_*.md"))
SHOWN = set(re.findall(r"^::: ([\w.]+)$", PAGES, re.M))


@pytest.mark.parametrize("package", ["pallas_kernels", "pallas_kernels.testing", "bridges", "jaxfp8rl",
                                     "jaxfp8rl.losses"])
def test_every_exported_name_is_shown(package):
    module = importlib.import_module(package)
    objects = {name: getattr(module, name) for name in module.__all__}
    homes = {name: f"{o.__module__}.{o.__qualname__}" for name, o in objects.items()
             if hasattr(o, "__qualname__")}
    assert len(homes) >= len(objects) - 1  # one constant at most
    assert {name: home for name, home in homes.items() if home not in SHOWN} == {}


@pytest.mark.parametrize("path", sorted(SHOWN))
def test_every_name_that_is_shown_exists(path):
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name)
