"""The experiments of this repository: every protocol can run, its results were registered before they were
made, and its page is what its lines say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from jaxfp8rl.experiments import protocol
from jaxfp8rl.experiments.cells import arms, cells
from jaxfp8rl.experiments.protocol import load_protocol
from jaxfp8rl.experiments.report import write_report
from jaxfp8rl.experiments.results import read_result, read_results

ROOT = Path(__file__).parents[3]
PROTOCOLS = sorted((ROOT / "experiments").glob("*.toml"))
RESULTS = sorted((ROOT / "experiments" / "results").glob("*/*.jsonl"))
GUESTS = sorted((ROOT / "experiments" / "results").glob("*/beside/*.jsonl"))
FOLDERS = sorted({path.parent for path in RESULTS})
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


def unregistered(root: Path, path: Path) -> str:
    """Why the lines at `path` were not registered, or "": a commit before the one that added them has the
    protocol that their header names."""
    header, file = read_result(path).header, f"experiments/{path.parent.name}.toml"
    added = git(root, "log", "--diff-filter=A", "--format=%H", "--", str(path.relative_to(root))).split()
    if not added:
        return ""  # they are not committed yet
    before = git(root, "log", "--format=%H", f"{added[-1]}~1", "--", file).split()
    for commit in before:
        text = subprocess.run(["git", "-C", str(root), "show", f"{commit}:{file}"],
                              capture_output=True).stdout
        if protocol.digest(text) == header["protocol"]:
            return ""
    return f"no commit before {added[-1][:9]} has {file} with the hash {header['protocol']}"


@pytest.mark.parametrize("path", RESULTS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_results_were_registered(path):
    assert path.stat().st_size < LARGEST
    assert path.stem == read_result(path).header["cell"]
    if git(ROOT, "rev-parse", "--is-shallow-repository").strip() == "false":
        assert unregistered(ROOT, path) == ""


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
    registered = lines(experiment, first, tmp_path / "runs", {0: 0.1, 4: 0.2})
    assert unregistered(tmp_path, registered) == ""  # not committed
    commit()
    assert unregistered(tmp_path, registered) == ""
    changed = small(tmp_path / "experiments", ("margin = 0.1", "margin = 0.2"))
    later = lines(changed, second, tmp_path / "runs", {0: 0.1, 4: 0.2})
    commit()  # the protocol and its results together
    assert "no commit before" in unregistered(tmp_path, later)
    assert unregistered(tmp_path, registered) == ""


def test_the_docs_list_every_experiment():
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8").partition("## Those of this")[2]
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (\[?`.*?) \|", text, re.M)))
    assert sorted(listed) == [path.stem for path in PROTOCOLS]
