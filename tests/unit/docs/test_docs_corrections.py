"""The pages about losses say what the code does: the table of presets is that of PRESETS, TOML loads, numbers
are the laboratory's."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.losses.advantages import ADVANTAGES
from jaxfp8rl.losses.aggregation import AGGREGATIONS
from jaxfp8rl.losses.correction import CorrectionConfig, Rejection
from jaxfp8rl.losses.objectives import OBJECTIVES
from jaxfp8rl.losses.presets import PRESETS

ROOT = Path(__file__).parents[3]
GUIDE, TABLE, OBJECTIVES_PAGE = ((ROOT / "docs" / name).read_text(encoding="utf-8")
                                 for name in ("corrections.md", "correction_presets.md", "objectives.md"))
BLOCKS = re.findall(r"^```toml\n(.*?)^```", GUIDE, re.S | re.M)
WEIGHTS = {"token": "ρ", "sequence": "ρ_seq", "geometric": "ρ_geo"}


def weight_cell(c: CorrectionConfig) -> str:
    if c.weight == "none":
        return "1"
    rho, low, high = WEIGHTS[c.weight], number(c.lower), number(c.upper)
    if c.action == "mask":
        cell = f"{rho} in [{low}, {high}], else 0"
    elif c.action == "clip":
        cell = f"clip({rho}, {low}, {high})"
    else:
        cell = rho if c.upper == math.inf else f"min({rho}, {high})"
    if c.adaptive:
        cell = f"1 - a + a {cell}"
    if c.batch_normalize:
        cell += " / batch mean"
    return cell


def keep_cell(c: CorrectionConfig) -> str:
    cells = [rejection_cell(r) for r in c.rejections]
    if c.m2_limit is not None:
        cells.insert(0, f"mean D^2 < {number(c.m2_limit)}")
    return ("in turn: " if c.in_turn else "") + ("; ".join(cells) or "-")


def rejection_cell(r: Rejection) -> str:
    """k1 between two bounds reads as the ratio it is the logarithm of."""
    log_ratio = r.statistic == "k1" and math.isfinite(r.lower)
    low, high = (math.exp(b) if log_ratio else b for b in (r.lower, r.upper))
    if r.statistic == "ratio" or log_ratio:
        subject = "ρ" if r.level == "token" else {"sum": "ρ_seq",
                                                  "mean": "ρ_geo"}.get(r.aggregation, f"{r.aggregation} ρ")
        subject = f"1/{subject}" if r.inverse else subject
    else:
        subject = {"mult_error": "e^abs(D)"}.get(r.statistic, r.statistic) + (" of 1/ρ" if r.inverse else "")
        subject = f"{r.aggregation} {subject}" if r.level == "sequence" else subject
    if low == -math.inf or high == math.inf:
        return f"{subject} <= {number(high)}" if low == -math.inf else f"{subject} >= {number(low)}"
    return f"{subject} in [{number(low)}, {number(high)}]"


def number(x: float) -> str:
    return "∞" if x == math.inf else f"{x:.6g}"


def table_rows() -> dict[str, list[str]]:
    rows = (line.strip("|").split(" | ") for line in TABLE.splitlines() if line.startswith("| `"))
    return {cells[0].strip().strip("`"): [c.strip() for c in cells[1:]] for cells in rows}


@pytest.mark.parametrize("name", PRESETS)
def test_the_table_has_every_preset_as_it_is(name):
    cells, config = table_rows().get(name), PRESETS[name]
    expected = [weight_cell(config), keep_cell(config), config.denominator, config.overflow]
    assert cells is not None and cells[
        :4] == expected, f"docs/correction_presets.md should say: | `{name}` | {' | '.join(expected)} |"


def test_the_table_has_the_laboratorys_numbers():
    records = json.loads((ROOT / "benchmarks" / "results" / "corrections.json").read_text())["records"][
        "presets"]
    for r in records:
        bias, share = (float(x.strip("%")) / 100 for x in table_rows()[r["preset"]][4:6])
        assert bias == pytest.approx(r["bias"], rel=0.2, abs=0.02), r["preset"]
        assert share == pytest.approx(r["effective_share"], rel=0.1, abs=0.01), r["preset"]


def test_there_are_examples():
    assert len(BLOCKS) >= 6


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.splitlines()[0][:40])
def test_every_toml_block_loads_on_top_of_the_demo(block, tmp_path):
    """Sections of the demo's config that the block names are replaced by the block's."""
    named = set(re.findall(r"^\[(\w+)\]", block, re.M))
    demo = (ROOT / "configs" / "demo.toml").read_text()
    sections = re.split(r"^(?=\[)", demo, flags=re.M)
    kept = [s for s in sections if s.strip().startswith("[") and re.match(r"\[(\w+)", s)[1] not in named]
    path = tmp_path / "run.toml"
    path.write_text("".join(kept) + "\n" + block)
    load_config(str(path))


def test_everything_to_choose_from_is_described():
    for name in (*OBJECTIVES, *ADVANTAGES, *AGGREGATIONS):
        assert f"`{name}`" in OBJECTIVES_PAGE, name
