"""The experiments of this repository: every protocol can run, its results were registered before they were
made, and its page is what its lines say."""

from __future__ import annotations

import functools
import re
import subprocess
from pathlib import Path

import pytest

from jaxfp8rl.experiments import analysis, protocol
from jaxfp8rl.experiments.cells import arms, cells
from jaxfp8rl.experiments.protocol import load_protocol
from jaxfp8rl.experiments.report import write_report
from jaxfp8rl.experiments.results import read_result, read_results

ROOT = Path(__file__).parents[3]
PROTOCOLS = sorted((ROOT / "experiments").glob("*.toml"))
GUESTS = sorted((ROOT / "experiments" / "results").glob("*/beside/*.jsonl"))
FOLDERS = sorted({path.parent for path in (ROOT / "experiments" / "results").glob("*/*.jsonl")})
LARGEST = 200_000  # bytes of a cell's lines


@pytest.mark.parametrize("path", PROTOCOLS, ids=lambda p: p.stem)
def test_a_protocol_describes_cells_that_can_run(path):
    experiment = load_protocol(str(path))
    grid, pilot = cells(experiment), cells(experiment, pilot=True)
    assert len(grid) == len(arms(experiment)) * len(experiment.protocol.seeds)
    assert {cell.digest for cell in grid}.isdisjoint(cell.digest for cell in pilot)
    assert len({cell.digest for cell in grid}) == len(grid)


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout


@functools.cache
def protocols_before(root: Path, commit: str, file: str) -> set[str]:
    """The hashes that `file` had in the commits before this one."""
    before = git(root, "log", "--format=%H", f"{commit}~1", "--", file).split()
    texts = [subprocess.run(["git", "-C", str(root), "show", f"{c}:{file}"], capture_output=True).stdout
             for c in before]
    return {protocol.digest(text) for text in texts}


def unregistered(root: Path, folder: Path) -> list[str]:
    """The lines in `folder`, of those that are committed, that were not registered: no commit before the one
    that added them has the protocol that their header names."""
    added, commit, file = {}, "", f"experiments/{folder.name}.toml"
    log = git(root, "log", "--diff-filter=A", "--no-renames", "--name-only", "--format=commit %H", "--",
              str(folder.relative_to(root)))
    for line in filter(None, log.splitlines()):
        if line.startswith("commit "):
            commit = line.split()[1]
        else:
            added[root / line] = commit  # the oldest comes last
    hashes = {path: read_result(path).header["protocol"] for path in sorted(folder.glob("*.jsonl"))}
    return [f"{path.name}: no commit before {added[path][:9]} has {file} with the hash {wanted}"
            for path, wanted in hashes.items()
            if path in added and wanted not in protocols_before(root, added[path], file)]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
def test_results_were_registered(folder):
    for path in folder.glob("*.jsonl"):
        assert path.stat().st_size < LARGEST
        assert path.stem == read_result(path).header["cell"]
    if git(ROOT, "rev-parse", "--is-shallow-repository").strip() == "false":
        assert unregistered(ROOT, folder) == []


def test_the_front_page_says_how_far_the_arms_in_fp8_lie_from_the_control():
    experiment = load_protocol(str(ROOT / "experiments/smollm2_sums.toml"))
    found = analysis.outcomes(experiment, read_results(ROOT / "experiments/results/smollm2_sums"))
    apart = [abs(c.difference.mean) for c in analysis.compare(experiment, found, {})
             if c.arm.startswith("fp8")]
    said = re.search(r"every FP8 arm ends within ([\d.]+) of it", (ROOT / "README.md").read_text())
    assert len(apart) == 3 and said and max(apart) <= float(said[1]) < max(apart) + 0.001


def test_the_lines_of_guests_are_small_and_named():
    for path in GUESTS:
        assert path.stat().st_size < LARGEST and path.stem == read_result(path).header["cell"], path


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: p.name)
@pytest.mark.parametrize("pilot", [False, True], ids=["grid", "pilot"])
def test_a_page_is_what_its_lines_say(folder, pilot, tmp_path):
    if not any(r.header["pilot"] == pilot for r in read_results(folder)):
        pytest.skip("no cell of it is done")
    name = f"{folder.name}-pilot.md" if pilot else f"{folder.name}.md"
    made = write_report(load_protocol(str(ROOT / "experiments" / f"{folder.name}.toml")), folder,
                        tmp_path / name,
                        pilot)
    assert made.read_text() == (ROOT / "docs" / "experiments"
                                / name).read_text(), "jaxfp8rl experiment report"


def test_lines_that_came_before_their_protocol_are_seen(tmp_path):
    from small_protocol import lines, small

    (tmp_path / "experiments").mkdir()
    commit = lambda: (git(tmp_path, "add", "-A", "experiments"), git(
        tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "a commit"))
    git(tmp_path, "init", "-q")
    experiment = small(tmp_path / "experiments")
    commit()
    first, second, *_ = cells(experiment)
    lines(experiment, first, tmp_path / "runs", {0: 0.1, 4: 0.2})
    assert unregistered(tmp_path, experiment.results) == []  # not committed
    commit()
    assert unregistered(tmp_path, experiment.results) == []
    changed = small(tmp_path / "experiments", ("margin = 0.1", "margin = 0.2"))
    later = lines(changed, second, tmp_path / "runs", {0: 0.1, 4: 0.2})
    commit()  # the protocol and its results together
    (why,) = unregistered(tmp_path, experiment.results)
    assert why.startswith(f"{later.name}: no commit before")
