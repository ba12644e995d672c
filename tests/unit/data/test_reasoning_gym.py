"""Every generator of reasoning-gym: its reference answer scores 1, what is no answer scores nothing, and
nothing is undefined."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from jaxfp8rl.data.tasks import make_task
from jaxfp8rl.rewards.scoring import judge

WITHOUT_REFERENCE = {"boxnet", "rush_hour"}
CHEAP = {"knight_swap": {"max_nodes": 6}, "sudoku": {}, "composite": {"datasets": [
    {"name": "gcd"}, {"name": "game_of_life_halting", "weight": 3.0},
    {"name": "leg_counting", "config": {"max_animals": 3}},
]}}
# What nobody would take for an answer, whatever was asked; the last two would never end if they were
# evaluated.
NONSENSE = [
    "", "abc", "nan", "{}", "null", "[]", "1e999", "<answer>", "[[", "x" * 10_000,
    "\u00e9\u6f22\U0001f600\u202e", "<think>", "inf", "-inf", "[NaN, NaN, NaN]", '["nan"]', "[null]",
    "[[]]", "[{}]", '{"a": 1}', "()", "(1,2)", "1 2 3", "1/0", "\\frac{1}{0}", "1e-999", "\\boxed{}",
    "I don't know", "???", "None None", "--", ";", "'", "(" * 3000, "[" * 3000, "-" * 9000 + "1",
    "1" * 5000, "\x00", "R999999999", "oracle_answer", "oracle_answer.split()",
    "[r.split() for r in valid_solutions[0].splitlines()]", "integrate(x, x)", "lambda: 0", "nan+nanj",
    "True False", "9**9**9", "1e999999999",
]


def generator(name: str, size: int, seed: int = 5):
    return make_task("reasoning_gym", name=name, size=size, held_out_size=0, seed=seed, **CHEAP.get(name, {}))


def faults(name: str, size: int, nonsense: list[str], seed: int = 5) -> list[tuple]:
    """(generator, what, score, allowed) of all that should not be."""
    found, task = [], generator(name, size, seed)
    for p in task.problems():
        entry = ast.literal_eval(p.meta["entry"])
        if name not in WITHOUT_REFERENCE and (
                shown := judge(task, p, task.demonstrate(p, None))).value != 1.0:
            found.append((name, p.answer, shown, 1.0))
        empty = float(task._dataset.score_answer("", entry)) if task.name != "composite" else 0.0
        for text in nonsense:
            score = judge(task, p, f"<answer>{text}</answer>")
            if score.value is None or (score.value > empty and text.strip(" ,") != p.answer.strip()):
                found.append((name, text[:60], score, p.answer[:60]))
    return found


def test_reference_answers_and_nonsense_of_every_generator():
    assert len(DATASETS) > 100
    assert [fault for name in sorted(DATASETS) for fault in faults(name, 1, NONSENSE)] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DATASETS))
def test_reference_answers_and_nonsense_of_many_problems(name):
    more = [f"{a}{b}" for a in ("", "0", "a", "[", "(", "{")
            for b in ("", "1", "NaN", "]", "x", ",", "=", "\n\n", ":", "\u2192")]
    assert faults(name, 12, NONSENSE + [x for x in more if not x.strip().isdigit()], seed=11) == []


MENDED = [  # generator, answer (of an entry, where it depends on it), score by upstream, score here
    ("game_of_life_halting", lambda e: "abc", 1.0, lambda e: 0.0),
    ("complex_arithmetic", lambda e: "nan", 1.0, lambda e: 0.0),
    ("number_sorting", lambda e: json.dumps([float("nan")] * len(ast.literal_eval(e["answer"]))), 1.0,
     lambda e: 0.0),
    ("spiral_matrix", lambda e: "oracle_answer.split()", 0.1, lambda e: 0.0),
    ("polynomial_multiplication", lambda e: f"expand({e['answer']})", 1.0, lambda e: 0.0),
    ("puzzle24", lambda e: "4*6*1*1", 1.0, lambda e: 0.0),
    ("syllogism", lambda e: "Yes No", None, lambda e: 0.0),
    ("leg_counting", lambda e: f"{e['answer']} legs", None, lambda e: 0.0),
    ("game_of_life", lambda e: "{}", KeyError, lambda e: 0.0),
    ("boxnet", lambda e: "null", TypeError, lambda e: 0.0),
    ("coin_flip", lambda e: "1e999", OverflowError, lambda e: 0.0),
    ("prime_factorization", lambda e: "abc", ValueError, lambda e: 0.0),
    # What upstream grades stays graded, and what is right in another form stays right.
    ("countdown", lambda e: f" {e['answer']} ", 1.0, lambda e: 1.0),
    ("fraction_simplification",
     lambda e: "{simplified_numerator}/{simplified_denominator}".format(**e["metadata"]),
     1.0, lambda e: 1.0),
    ("rectangle_count", lambda e: str(int(e["answer"]) + 1), 0.64, lambda e: 0.64),
    ("complex_arithmetic", lambda e: e["answer"].replace(" ", "").replace("i", "j"), 1.0, lambda e: 1.0),
    ("number_sorting", lambda e: e["answer"].replace('"', "'"), 1.0, lambda e: 1.0),
    ("gsm_symbolic", lambda e: e["answer"] + ".0", 1.0, lambda e: 1.0),
    ("sudoku", lambda e: e["answer"].replace(" ", ""), 0.9, lambda e: 0.9),
]


@pytest.mark.parametrize(("name", "answer", "upstream", "here"), MENDED)
def test_a_fault_of_upstreams_is_mended_and_grades_are_kept(name, answer, upstream, here):
    (p,) = (task := generator(name, 1)).problems()
    entry = ast.literal_eval(p.meta["entry"])
    text = answer(entry)
    if isinstance(upstream, type):
        with pytest.raises(upstream):
            task._dataset.score_answer(text, entry)
    elif upstream is not None:
        assert task._dataset.score_answer(text, entry) == pytest.approx(upstream)
    assert judge(task, p, f"<answer>{text}</answer>").value == pytest.approx(here(entry))


def test_an_empty_answer_is_right_where_the_reference_is_empty():
    task = generator("ab", 30, seed=1)
    empty = [p for p in task.problems() if not p.answer]
    assert empty and all(task.score(p, "<answer></answer>") == 1.0 and task.score(p, "no tag") == 0.0
                         for p in empty)
    boxes = generator("boxnet", 1)
    assert [boxes.score(p, "<answer></answer>") for p in boxes.problems()] == [0.0]


def test_a_broken_generator_is_undefined_and_not_wrong(monkeypatch):
    task = generator("gcd", 1)
    (p,) = task.problems()

    def broken(answer, entry):
        raise KeyError("upstream")

    monkeypatch.setattr(task._dataset, "score_answer", broken)
    score = judge(task, p, "<answer>7</answer>")
    assert score.value is None and "KeyError" in score.why


def test_the_docs_name_the_generators_without_a_reference():
    page = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text(encoding="utf-8")
    (named,) = re.findall(r"((?:`\w+`(?:,| and)? ?)+)have no reference answer", page)
    assert set(re.findall(r"\w+", named.replace(" and ", " "))) == WITHOUT_REFERENCE
    assert reasoning_gym.__name__ in page.replace("-", "_")


def test_solved_examples_come_before_each_question_and_are_asked_nowhere_else():
    make = lambda **how: make_task("reasoning_gym", name="chain_sum", size=60, held_out_size=20, min_terms=2,
                                   max_terms=2, max_digits=1, extract="last_number", instruction="Answer:",
                                   **how)
    plain, shown, chat = make(), make(examples=2), make(examples=2, chat=True)
    prompt = shown.problems()[0].prompt
    *solved, asked = prompt.split("\n\n")
    assert asked == plain.problems()[0].prompt and len(solved) == 2
    assert all(re.fullmatch(r".+ =\nAnswer: -?\d+", example) for example in solved)
    questions = {example.split("\n")[0] for example in solved}
    assert questions & {p.question for p in plain.problems()}, "else nothing would have to be dropped"
    assert not questions & {p.question for p in (*shown.problems(), *shown.held_out())}
    messages = chat.problems()[0].prompt
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2 + ["user"]
    assert f'{messages[0]["content"]} {messages[1]["content"]}' == solved[0]
