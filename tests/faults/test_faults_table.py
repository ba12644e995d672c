"""docs/faults.md has every row, and each names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
ROWS = {int(n): line for line, n in re.findall(r"^(\| (\d+) \|.*)$", TEXT, re.M)}


def test_the_table_has_all_forty_rows():
    assert list(ROWS) == list(range(1, 41))
    for row, line in ROWS.items():
        assert len(re.split(r"(?<!\\) \| ", line)) == 4 and "tests/" in line, f"row {row}"


def test_every_row_names_tests_that_exist():
    named = {found for line in ROWS.values() for found in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line)}
    assert len(named) > 100
    assert [f"{f}::{t}" for f, t in sorted(named)
            if not re.search(rf"def {t}\b", (ROOT / f).read_text(encoding="utf-8"))] == []


def test_every_test_that_is_called_by_a_row_stands_in_it():
    for file in sorted((ROOT / "tests" / "faults").glob("test_*.py")):
        for test, row in re.findall(r"^def (test_row_(\d+)_\w+)", file.read_text(encoding="utf-8"), re.M):
            assert test in ROWS[int(row)], f"row {row} of docs/faults.md does not name {test}"
