"""The layouts of public data sets, read by the very lines of docs/datasets.md; and every form of file, field
and reference.

Rows are written here in the sets' own columns; what each must come to is worked out by hand.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.file_task import FileTask
from jaxfp8rl.data.rows import Fields, read_rows
from jaxfp8rl.data.tasks import make_task
from jaxfp8rl.errors import DataError

PAGE = (Path(__file__).parents[3] / "docs" / "datasets.md").read_text()
LINES = re.findall(r"^\*\*(.*?)\*\*.*?^```toml\n(.*?)^```", PAGE, re.S | re.M)
GSM8K = [
    {"question": "Natalia sold clips to 48 friends.",
     "answer": "48/2 = <<48/2=24>>24 in May.\nAltogether 72.\n#### 72"},
    {"question": "How many cents?", "answer": "It is $<<12*100=1200>>1200.\n#### 1,200"},
]
VERL = [
    {"data_source": "openai/gsm8k", "prompt": [{"content": f"What is {n} - 1?", "role": "user"}],
     "ability": "math",
     "reward_model": {"ground_truth": str(n - 1), "style": "rule"},
     "extra_info": {"split": "train", "index": n, "answer": f"#### {n - 1}", "question": "?"}}
     for n in (73, 1201)
]
DAPO = [{"data_source": "math_dapo", "prompt": [{"content": f"Solve {n}.", "role": "user"}],
         "ability": "MATH",
         "reward_model": {"ground_truth": str(n), "style": "rule-lighteval/MATH_v2"},
         "extra_info": {"index": f"{n}-uuid"}}
        for n in (34, 5, 34, 5, 34)]
OPENR1 = [
    {"problem": f"What is {n}?", "solution": "long", "answer": f"{n}", "problem_type": "Algebra", "uuid": "u",
     "is_reasoning_complete": [True], "messages": [
         {"content": f"What is {n}?", "role": "user"},
         {"content": f"<think>..</think> It is {n}.", "role": "assistant"}]}
    for n in (7, 8)
]
SETS = dict(zip((name for name, _ in LINES), (GSM8K, VERL, DAPO, OPENR1)))
ANSWERS = dict(zip(SETS, (["72", "1200"], ["72", "1200"], ["34", "5"], ["7", "8"])))


def test_there_are_four_of_five_lines_each():
    assert len(LINES) == 4 and all(len(text.splitlines()) == 6 for _, text in LINES)


@pytest.mark.parametrize(("name", "text"), LINES, ids=[name[:20] for name, _ in LINES])
def test_a_public_layout_is_read_by_five_lines_of_toml(name, text, tmp_path):
    """And a right completion scores 1, a wrong one 0; the other columns reach the scorer; no reply is in a
    prompt."""
    path = re.search(r'path = "(.*)"', text)[1]
    file = tmp_path / path.replace("*", "00000-of-00001")
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(SETS[name]), file)
    demo = re.split(r"^(?=\[)", (Path(__file__).parents[3] / "configs" / "demo.toml").read_text(), flags=re.M)
    config = tmp_path / "run.toml"
    others = "".join(part for part in demo if not part.startswith("[task"))
    config.write_text(others + "\n" + text.replace(path, str(tmp_path / path)))
    task = make_task(load_config(str(config), ["--train.row_tokens", "4096"]).task)
    problems = sorted([*task.problems(), *task.held_out()], key=lambda p: int(p.id.split(":")[-1]))
    assert [p.answer for p in problems] == ANSWERS[name]
    for p in problems:
        told = p.prompt if isinstance(p.prompt, str) else p.prompt[-1]["content"]
        assert "It is" not in told and (isinstance(p.prompt, str) or p.prompt[-1]["role"] == "user")
        assert task.score(p, f"So it is\n{p.answer}") == 1.0 and task.score(p, "So it is\n99999") == 0.0
    columns = set(SETS[name][0]) - {"question", "prompt", "messages", "answer"}
    assert columns <= set(problems[0].meta) or name.startswith("GSM8K as Hugging")
    if "DAPO" in name:
        assert any("dropped 3 of 5 rows" in note for note in task.report.notes)
    if "OpenR1" in name:
        assert any("cut the assistant's reply off 2 of 2" in note for note in task.report.notes)


ROWS = [{"prompt": f"{i}+1?", "answer": str(i + 1), "level": i} for i in range(4)]


def written(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(r) + "\n" for r in ROWS)
    match name.split(".", 1)[1]:
        case "jsonl":
            path.write_text(lines)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        case "json":
            path.write_text(json.dumps({"data": ROWS} if "data" in name else ROWS, indent=1))
        case "csv" | "tsv" as kind:
            with path.open("w", newline="") as f:
                table = csv.DictWriter(f, ROWS[0], delimiter="\t" if kind == "tsv" else ",")
                table.writeheader()
                table.writerows(ROWS)
        case "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("name",
                         ["r.jsonl", "r.jsonl.gz", "r.json", "data.json", "r.csv", "r.tsv", "r.parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    found = read_rows(str(written(tmp_path, name)))
    assert [(r.prompt, r.answers) for r in found.rows] == [(r["prompt"], (r["answer"],))
                                                           for r in ROWS] and not found.bad
    assert [int(r.meta["level"]) for r in found.rows] == [0, 1, 2, 3]


def test_a_folder_and_a_glob_are_all_their_shards_and_of_one_split(tmp_path, monkeypatch):
    for k in (0, 1):
        rows = [{"prompt": f"{k}:{r['prompt']}", "answer": r["answer"]} for r in ROWS]
        (tmp_path / "data").mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows),
                                    tmp_path / "data" / f"train-0000{k}-of-00002.parquet")
    (tmp_path / "data" / "README.md").write_text("# a card")
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in (tmp_path / "data", tmp_path / "data" / "train-*.parquet", "~/data"):
        assert len(read_rows(str(path)).rows) == 8
    written(tmp_path, "data/test-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"several splits: .*test .*test-00000.*train .*train-0000\*"):
        read_rows(str(tmp_path / "data"))
    with pytest.raises(DataError, match="no such file: .*nothere"):
        read_rows(str(tmp_path / "nothere.jsonl"))


@pytest.mark.parametrize(("reference", "answers"), [
    (2, ("2",)), (2.5, ("2.5",)), ("2.50", ("2.50",)), (["2", "two"], ("2", "two")), ([2, 2.0], ("2", "2.0")),
    (-7, ("-7",)),
    ("x\n#### $1,234.50", ("1234.50",)), ("#### 5\nmore", ("#### 5\nmore",)),
])
def test_references_of_every_kind(tmp_path, reference, answers):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"prompt": "?", "answer": reference}) + "\n")
    assert read_rows(str(path)).rows[0].answers == answers


def test_each_of_several_accepted_answers_scores(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"prompt": "?", "answer": ["2", "two"]}) + "\n")
    (p,) = FileTask(str(path), held_out_fraction=0.0).problems()
    task = FileTask(str(path))
    assert [task.score(p, text) for text in ("2", "two", "2.0", "three")] == [1.0, 1.0, 1.0, 0.0]


@given(st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), min_size=1, max_size=6))
def test_no_prompt_ends_with_what_the_assistant_said_to_the_last_question(tmp_path_factory, roles):
    """A law: with replies dropped, the messages behind the last user's turn are gone if the assistant began
    them."""
    path = tmp_path_factory.mktemp("rows") / "r.jsonl"
    messages = [{"role": role, "content": f"{i}"} for i, role in enumerate(roles)]
    path.write_text(json.dumps({"prompt": messages, "answer": "1"}) + "\n")
    for row in read_rows(str(path), Fields(replies="drop")).rows:
        last = max((i for i, role in enumerate(roles) if role == "user"), default=-1)
        assert [m["content"] for m in row.prompt] == [str(i) for i in range(len(row.prompt))]
        assert "assistant" not in roles[last + 1 : len(row.prompt)] and len(row.prompt) > last


def test_a_file_may_grow_and_no_row_changes_sides(tmp_path):
    rows = [json.dumps({"prompt": f"{i}?", "answer": "1"}) + "\n" for i in range(400)]
    sides = []
    for n in (200, 400):
        (tmp_path / "r.jsonl").write_text("".join(rows[:n]))
        task = FileTask(str(tmp_path / "r.jsonl"))
        sides.append(({p.prompt for p in task.problems()}, {p.prompt for p in task.held_out()}))
    assert sides[0][0] <= sides[1][0] and sides[0][1] <= sides[1][1] and sides[0][1]


def test_reading_takes_no_longer_a_row_of_a_long_file(tmp_path):
    """A quadratic step would make the second some four times the first. The best of three tries counts, for a
    busy machine."""
    line = lambda i: json.dumps({"prompt": [{"role": "user", "content": f"What is {i % 3000}? " * 20}],
                                 "answer": str(i)}) + "\n"

    def seconds_a_row(n: int) -> float:
        (tmp_path / "r.jsonl").write_text("".join(map(line, range(n))))
        spent = []
        for _ in range(3):
            begun = time.process_time()
            assert read_rows(str(tmp_path / "r.jsonl")).total == n
            spent.append((time.process_time() - begun) / n)
        return min(spent)

    short, long = seconds_a_row(2000), seconds_a_row(8000)
    assert long < 2 * short, (short, long)
