"""Tasks: what they yield, that held-out problems stay held out, and what a wrong option or row says."""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfp8rl.config.sampling import Task as TaskSection
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.tasks import OF_SECTION, TASKS, as_json, from_json, make_task
from jaxfp8rl.errors import ConfigError, DataError


def pair(problem):
    a, b = (int(x) for x in problem.prompt.rstrip("=").replace("*", "+").replace("-", "+").split("+"))
    return min(a, b), max(a, b)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.sets(st.sampled_from("+-*"), min_size=1), st.integers(0, 2**31 - 1),
       st.integers(1, 3000))
def test_arithmetic_is_right_distinct_and_split_by_pair(max_operand, operations, seed, size):
    task = make_task("arithmetic", max_operand=max_operand, operations=tuple(operations), seed=seed,
                     size=size,
                     held_out_fraction=0.3)
    train, held_out = task.problems(), task.held_out()
    everything = [*train, *held_out]
    assert len(everything) == min(size, (max_operand + 1) ** 2
                                  * len(operations)) == len({p.prompt for p in everything})
    assert not {pair(p) for p in train} & {pair(p) for p in held_out}
    for p in everything:
        assert eval(p.prompt.rstrip("=")) == int(p.answer)
        assert task.score(p, p.answer) == 1.0 and task.score(p, p.answer + "0") == task.score(p, "") == 0.0
    again = from_json(as_json(task))
    assert again == task and list(again.problems()) == list(train)
    rng = np.random.default_rng(0)
    assert [task.demonstrate(p, rng) for p in train] == [p.answer for p in train]


def test_arithmetic_held_out_share_and_seed():
    one, two = (make_task("arithmetic", seed=s) for s in (0, 1))
    assert 0.05 < len(one.held_out()) / 10_000 < 0.15
    assert one.problems()[:20] != two.problems()[:20]


@pytest.mark.parametrize(("kind", "options", "words"), [
    ("arithmetics", {}, ['did you mean "arithmetic"']),
    ("arithmetic", {"max_operands": 9}, ["task.options.max_operands: ", 'did you mean "max_operand"']),
    ("arithmetic", {"max_operand": "9"},
     ["task.options.max_operand: ", 'expected an integer, got "9" (a string)']),
    ("arithmetic", {"max_operand": 5000}, ["max_operand: must be at most 999, got 5000"]),
    ("arithmetic", {"operations": ["/"]}, ["operations: ", '"/" is not a choice (known: *, +, -)']),
    ("arithmetic", {"operations": ["+", "+"]}, ["once"]),
    ("arithmetic", {"chat": True}, ['task.chat: ', 'no option "chat"']),
    ("file", {}, ["task.path", "needs it"]),
    ("file", {"path": "x.jsonl", "scorer": "exakt"}, ['did you mean "exact"']),
    ("file", {"path": "x.jsonl", "system_prompt": "hi"}, ["set task.chat = true"]),
    ("file", {"path": "x.jsonl", "extract": "tags"},
     ["task.options.extract: ", '"tags" is not a choice (did you mean "tag"?)']),
    ("reasoning_gym", {}, ["task.name", "needs it"]),
    ("reasoning_gym", {"name": "chain_sums"}, ['did you mean "chain_sum"']),
    ("reasoning_gym", {"name": "chain_sum", "max_term": 3}, ['"max_term"', 'did you mean "max_terms"']),
    ("reasoning_gym", {"name": "chain_sum", "min_terms": 9, "max_terms": 2}, ["refuses", "max_terms"]),
    ("reasoning_gym", {"name": "chain_sum", "min_terms": "two"}, ["refuses", "two"]),
])
def test_wrong_options_name_the_option_and_the_nearest_right_one(kind, options, words):
    with pytest.raises(ConfigError) as e:
        make_task(kind, **options)
    assert all(w in str(e.value) for w in words), str(e.value)


def test_the_page_has_every_option_with_its_default():
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text()
    for cls, text in zip(TASKS.values(), page.split("\n## ")[1:]):
        rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", text.split("`task.scorer` is")[0], re.M))
        fields = {f.name: f for f in dataclasses.fields(cls) if f.name not in (*OF_SECTION, "options")}
        assert f"`{cls.kind}`" in text.splitlines()[0] and rows.keys() == fields.keys()
        for name, field in fields.items():
            assert tomllib.loads(f"x = {rows[name]}".replace("`", ""))["x"] == (
                list(field.default) if isinstance(field.default, tuple) else field.default)


def test_a_task_from_the_configuration():
    section = TaskSection(kind="reasoning_gym", name="chain_sum", chat=True, system_prompt="Be brief.",
                          max_prompt_tokens=64,
                          options={"size": 5, "held_out_size": 5, "max_terms": 2, "extract": "last_number"})
    task = make_task(section)
    assert (task.seed, task.size, task.options) == (0, 5, {"max_terms": 2})
    system, user = task.problems()[0].prompt
    assert system == {"role": "system", "content": "Be brief."} and user["role"] == "user"
    own_seed = TaskSection(kind="arithmetic", max_prompt_tokens=8, seed=7, options={"operations": ["+", "-"]})
    assert make_task(own_seed) == make_task("arithmetic", seed=7, operations=("+", "-"))
    # one place for each: what a config runs is to be seen
    for key, value in {"path": "b", "scorer": "b", "seed": 7}.items():
        elsewhere = TaskSection(kind="file", max_prompt_tokens=64, options={key: value})
        with pytest.raises(ConfigError,
                           match=f"task.options.{key}: a key of .task. itself\n  next step: task.{key}"):
            make_task(elsewhere)


# Each with an answer in the form a small instruct model writes, and how the task reads it.
@pytest.mark.parametrize(("name", "options", "extract"), [
    ("basic_arithmetic", {"max_terms": 2, "max_digits": 1}, "last_number"),
    ("chain_sum", {"max_terms": 3}, "tag"),
    ("letter_counting", {"max_words": 6}, "last_number"),
    ("simple_equations", {"max_value": 20}, "tag"),
    ("gcd", {}, "last_number"),
    ("leg_counting", {}, "last_number"),
    ("spell_backward", {"max_word_len": 5}, "last_line"),
    ("number_sorting", {}, "last_line"),
    ("knights_knaves", {}, "tag"),  # numpy strings in its metadata
    ("arc_agi", {}, "tag"),  # tuples in its metadata, which JSON would lose
])
def test_reasoning_gym_generators_score_their_own_answers(name, options, extract):
    task = make_task("reasoning_gym", name=name, size=12, held_out_size=12, extract=extract, seed=5,
                     **options)
    train, held_out = task.problems(), task.held_out()
    assert len(train) == 12 and held_out and not {p.prompt for p in train} & {p.prompt for p in held_out}
    wrap = {"last_number": "The answer is {} .", "tag": "So <answer>1</answer> no, <answer> {} </answer>",
            "last_line": "Let me see:\n{}\n\n"}[extract]
    right = [task.score(p, wrap.format(p.answer)) for p in train]
    wrong = [task.score(p, wrap.format("??")) for p in train]
    assert right == [1.0] * 12 and max(wrong) < 0.3
    shown = [task.score(p, task.demonstrate(p, np.random.default_rng(0))) for p in train]
    assert shown == [1.0] * 12, "a warm start imitates these"
    assert task.score(train[0], "") == 0.0
    assert json.loads(json.dumps(train[0].meta)) == train[0].meta


def test_reasoning_gym_with_too_few_questions_says_so():
    task = make_task("reasoning_gym", name="chain_sum", size=200, held_out_size=2, min_terms=2, max_terms=2,
                     min_digits=1, max_digits=1, extract="all")
    questions = [p.prompt for p in task.problems()]
    assert len(set(questions)) < 200
    with pytest.raises(ConfigError, match="repeats itself"):
        make_task("reasoning_gym", name="coin_flip", size=400, held_out_size=1, min_trials=1, max_trials=1,
                  extract="all").held_out()


def write_jsonl(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows),
                    encoding="utf-8")
    return str(path)


GOOD = [{"prompt": f"q{i}", "answer": str(i)} for i in range(200)]
MESSAGES = [{"role": "user", "content": "hi"}]
BAD = [
    ('{"prompt": "x", ', "malformed JSON"), ("", "blank line"), ("[1]", "must be an object, but is a list"),
    ({"promt": "x", "answer": "1"}, 'field "prompt": missing (did you mean "promt"?)'),
    ({"prompt": "x"}, 'field "answer": missing'),
    ({"prompt": "x", "answer": True},
     'field "answer": must be a string, a number or a list of these, but is a boolean'),
    ({"prompt": [*MESSAGES, {"role": "assistant", "content": "It is 2."}], "answer": "1"},
     "ends with the assistant's reply"),
    ({"prompt": "caf\ud800", "answer": "1"}, 'field "prompt": contains half a character, U+D800'),
    ({"prompt": "x", "answer": " "}, 'field "answer": empty'),
    ({"prompt": None, "answer": "1"}, "but is null"),
    ({"prompt": " ", "answer": "1"}, 'field "prompt": empty'),
    ({"prompt": [], "answer": "1"}, 'field "prompt": empty'),
    ({"prompt": [*MESSAGES, {"role": "user"}], "answer": "1"}, "message 1 must be {role, content}"),
    ({"prompt": [{"role": "user", "content": 1}], "answer": "1"}, "message 0 must be {role, content}"),
]


@pytest.mark.parametrize("extract", ["all", "tag", "last_line", "last_number"])
def test_a_files_answer_scores_as_it_is_demonstrated(tmp_path, extract):
    path = tmp_path / "rows.jsonl"
    answers = "1,234", "-5", "\u22126", ".5"
    path.write_text("".join(json.dumps({"prompt": f"q{i}", "answer": a}) + "\n"
                            for i, a in enumerate(answers)))
    task = make_task("file", path=str(path), extract=extract, held_out_fraction=0.0)
    for p in task.problems():
        assert task.score(p, task.demonstrate(p, np.random.default_rng(0))) == 1.0, p.answer
        assert extract != "last_number" or task.score(p, f"It is {p.answer}.") == 1.0


EXPRESSIONS = ["\\sqrt{2}", "x^2+1", "(1,2)", "C", "\\{1,2,3\\}", "\\frac{1}{2}", "$\\pi$", "\\boxed{7}",
               "\\$18.90", "1,000",
               "1e3", "\u22125", "10%", "5 apples"]


@pytest.mark.parametrize("extract", ["all", "tag", "last_line"])
@pytest.mark.parametrize("answer", EXPRESSIONS)
def test_an_expression_scores_as_it_is_demonstrated(answer, extract):
    task = make_task("file", path="unused.jsonl", scorer="math_verify", extract=extract)
    problem = Problem("p", "?", answer)
    assert task.score(problem, task.demonstrate(problem, np.random.default_rng(0))) == 1.0


@pytest.mark.parametrize(("answer", "text", "value"), [
    ("1000", "1e3", 1.0), ("1000", "1,000", 1.0), ("5", "5 apples", 1.0), ("10", "10%", 1.0),
    ("18", "\\$18", 1.0),
    ("\\sqrt{2}", "$\\sqrt{2}$", 1.0), ("\\$18.90", "18.90", 1.0), ("2", "\\sqrt{2}", 0.0),
    ("3", "2x+3", 0.0), ("C", "D", 0.0),
])
def test_what_a_tag_holds_is_read_as_latex_and_else_as_text(answer, text, value):
    task = make_task("file", path="unused.jsonl", scorer="math_verify", extract="tag")
    assert task.score(Problem("p", "?", answer), f"So <answer>{text}</answer>") == value


@pytest.mark.parametrize("answer", ["72 apples", "9*2 = 18", "five", "?"])
def test_an_answer_that_no_last_number_can_match_is_a_bad_row(tmp_path, answer):
    rows = [{"prompt": "x", "answer": answer}, "", {"prompt": "y", "answer": "1,000"},
            {"prompt": "z", "answer": "18."}]
    bad, good = write_jsonl(tmp_path / "bad.jsonl", rows), write_jsonl(tmp_path / "good.jsonl", GOOD)
    says = re.escape(
        f'{bad}:1: field "answer": is not a number, but extract = "last_number" gives numbers: write '
        f'the number alone')
    for options in ({"path": bad, "held_out_fraction": 0.0}, {"path": good, "held_out_path": bad}):
        with pytest.raises(DataError, match=says):
            make_task("file", extract="last_number", **options).problems()
        task = make_task("file", extract="last_number", skip_bad_rows=True, **options)
        assert [b.line for b in task.report.bad] == [1, 2] and len(task.problems()) + len(
            task.held_out()) == task.report.rows - 2
    make_task("file", path=write_jsonl(tmp_path / "text.jsonl", rows[:1]), held_out_fraction=0.0).problems()


@pytest.mark.parametrize(("row", "words"), BAD)
def test_a_bad_row_is_named_by_file_line_field_and_reason(tmp_path, row, words):
    path = write_jsonl(tmp_path / "d.jsonl", [GOOD[0], row, GOOD[1]])
    with pytest.raises(DataError) as e:
        make_task("file", path=path, held_out_fraction=0.0).problems()
    assert f"1 of 3 rows cannot be used:\n  {path}:2: " in str(e.value) and words in str(e.value)
    assert "task.options.prompt_field" in str(e.value) and "task.skip_bad_rows = true" in str(e.value)


def test_bad_rows_are_skipped_and_counted_when_asked(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", [*GOOD, *(row for row, _ in BAD)])
    with pytest.raises(DataError) as e:
        make_task("file", path=path).problems()
    assert str(e.value).count(f"{path}:") == 5 and f"and {len(BAD) - 5} more" in str(e.value)
    task = make_task("file", path=path, skip_bad_rows=True)
    assert len(task.problems()) + len(task.held_out()) == 200
    last = 200 + len(BAD)
    assert task.report.rows == last and [b.line for b in task.report.bad] == list(range(201, last + 1))


def test_invalid_utf8_is_a_bad_row(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "\xff"}\n{"prompt": "b", "answer": "1"}\n')
    with pytest.raises(DataError, match="d.jsonl:1: malformed JSON.*utf-8"):
        make_task("file", path=str(path)).problems()


def test_the_held_out_fraction_is_seeded_and_keeps_equal_prompts_together(tmp_path):
    path = write_jsonl(tmp_path / "d.jsonl", GOOD + GOOD)
    splits = [make_task("file", path=path, held_out_fraction=0.25, seed=s, repeats="keep") for s in (0, 0, 1)]
    ids = [[p.id for p in t.held_out()] for t in splits]
    assert ids[0] == ids[1] != ids[2] and 60 < len(ids[0]) < 140
    assert not {p.prompt for p in splits[0].problems()} & {p.prompt for p in splits[0].held_out()}


def test_a_held_out_file_takes_its_prompts_out_of_training(tmp_path):
    train, test = write_jsonl(tmp_path / "a.jsonl", GOOD), write_jsonl(tmp_path / "b.jsonl", GOOD[:3])
    with pytest.raises(DataError, match="a.jsonl:1: .*also held out"):
        make_task("file", path=train, held_out_path=test).problems()
    task = make_task("file", path=train, held_out_path=test, skip_bad_rows=True)
    assert (len(task.problems()), len(task.held_out()), len(task.report.bad)) == (197, 3, 3)


def test_the_first_held_out_problems_do_not_follow_the_file(tmp_path):
    """A file sorted by subject, as benchmarks are: of 100 of 400, each of two subjects has about 50, whatever
    the seed."""
    rows = [{"prompt": f"{subject} {i}", "answer": "1"} for subject in ("algebra", "geometry")
            for i in range(200)]
    train = write_jsonl(tmp_path / "train.jsonl", GOOD)
    tests = [write_jsonl(tmp_path / f"{n}.jsonl", order) for n, order in enumerate((rows, rows[::-1]))]
    files = [make_task("file", path=train, held_out_path=test, seed=s) for test in tests for s in (0, 1)]
    first = [[p.prompt for p in task.held_out()[:100]] for task in files]
    assert all(prompts == first[0] for prompts in first)
    assert 30 < sum(prompt.startswith("algebra") for prompt in first[0]) < 70
    shares = [make_task("file", path=test, held_out_fraction=0.5).held_out() for test in tests]
    assert [p.prompt for p in shares[0]] == [p.prompt
                                             for p in shares[1]] != sorted(p.prompt for p in shares[0])


def test_parquet_messages_and_field_names(tmp_path):
    path = str(tmp_path / "d.parquet")
    table = pyarrow.table({"messages": [MESSAGES, MESSAGES], "gold": ["1", None]})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(DataError, match='d.parquet:2: field "gold": must be .*, but is null'):
        make_task("file", path=path, prompt_field="messages", answer_field="gold").problems()
    task = make_task("file", path=path, prompt_field="messages", answer_field="gold", skip_bad_rows=True,
                     held_out_fraction=0.0, chat=True, system_prompt="S")
    (problem,) = task.problems()
    assert problem.prompt == ({"role": "system", "content": "S"}, *MESSAGES)
    assert task.score(problem, " 1. ") == 1.0


def test_files_that_cannot_be_read_at_all(tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no")
    write_jsonl(tmp_path / "empty.jsonl", [])
    for name, words in (("none.jsonl", "no such file"), ("broken.parquet", "cannot be read as Parquet"),
                        ("empty.jsonl", "no usable row")):
        with pytest.raises(DataError, match=words):
            make_task("file", path=str(tmp_path / name)).problems()
    (tmp_path / "d.pkl").write_bytes(b"\x80\x04N.")
    with pytest.raises(DataError, match="not one of .jsonl, .json, .csv"):
        make_task("file", path=str(tmp_path / "d.pkl")).problems()
