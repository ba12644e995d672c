"""Runs to report on, written once per module, the page of the first and the comparison of all."""

import itertools
from pathlib import Path

import pytest
from report_pages import Page, a_run

from jaxfp8rl.monitors.report import write_report


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two settings over three seeds."""
    folder = tmp_path_factory.mktemp("runs")
    for seed, (name, lr) in itertools.product(range(3), (("a", 1e-3), ("b", 2e-3))):
        a_run(folder / f"{name}{seed}", seed=seed, lr=lr, shift=100 * (lr - 1e-3))
    return folder


@pytest.fixture(scope="module")
def page(folder) -> Page:
    return Page(write_report([folder / "a0"]))


@pytest.fixture(scope="module")
def comparison(folder) -> Page:
    return Page(write_report(sorted(folder.glob("??"))))
