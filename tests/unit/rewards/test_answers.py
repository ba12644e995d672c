"""Answers in a completion: where one is looked for, and when two are equal."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import problem

from bridges.api import Completion, VersionSpan
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.tasks import make_task
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.rewards.runner import RewardRunner
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.scored_groups import Prompt
from jaxfp8rl.verifiers.numbers import last_number, value, whole_number
from jaxfp8rl.verifiers.scorers import (
    THINK_TAGS,
    behind_thoughts,
    exact_match,
    extract,
    math_verify,
    normalise,
)

MATH = [("1/2", "so \\boxed{\\frac{1}{2}}", 1.0), ("0.5", "The answer is $\\frac12$", 1.0),
        ("12", "12 + 30 = 42", 0.0),
        ("x^2+2x+1", "$(x+1)^2$", 1.0), ("2x+3", "it is 3", 0.0), ("x=3", "$x = 3$", 1.0),
        ("$\\sqrt{4}$", "2", 1.0),
        ("\\frac{3}{4}", "no idea", 0.0), ("1000", "1000.0", 1.0), ("1000", "1e3", 1.0), ("1", "1e3", 0.0),
        ("2.5E3", "2500", 1.0), ("0.00001", "1e-5", 1.0), ("-1/2", "-.5", 1.0),
        ("\\$18.90", "so \\boxed{18.90}", 1.0), ("\\$1,000", "1000", 1.0), ("\\(x^2\\)", "$x^2$", 1.0),
        ("1", "1e999999999", 0.0), ("0", "1e-999999999", 1.0)]


@pytest.mark.parametrize(("answer", "text", "value"), MATH)
def test_math_verify(answer, text, value):
    assert math_verify(answer, text) == value


def test_math_verify_runs_in_the_child_and_an_unreadable_reference_is_undefined():
    task = make_task("file", path="unused.jsonl", scorer="math_verify")
    with RewardRunner(task) as runner:
        assert [s.value for s in runner.score([(problem(a), t) for a, t, _ in MATH])] == [v for *_, v in MATH]
        (score,) = runner.score([(problem("???"), "12")])
        assert score.value is None and "reference answer '???'" in score.why


@pytest.mark.parametrize(("how", "text", "answer"), [
    ("all", " 12\n", "12"), ("last_line", "a\n b \n\n", "b"), ("last_line", "", None),
    ("tag", "<answer>1</answer><answer> 2 </answer> x", "2"), ("tag", "</answer><answer>3", None),
    ("tag", "4", None),
    ("last_number", "12 + 30 = 1,042.", "1042"), ("last_number", "12-5", "5"),
    ("last_number", "x = -5", "-5"),
    ("last_number", "about 3.50", "3.50"), ("last_number", "none", None),
    ("last_number", "of 12 the share is .25.", ".25"), ("last_number", "-.5", "-.5"),
    ("last_number", "1-.5", ".5"),
    ("last_number", "about 1e-5", "1e-5"), ("last_number", "2.5e3 m", "2.5e3"),
    ("last_number", "3 eggs", "3"),
    ("last_number", "4 in section.7 of 1.2.3", "1.2"), ("last_number", "4 in section.7", "4"),
    ("last_number", "So the answer is...42", "42"), ("last_number", "x = \u22125", "-5"),
])
def test_extract(how, text, answer):
    assert extract(text, how) == answer


@given(st.text(max_size=40))
def test_exact_match_is_reflexive_and_blind_to_space(text):
    assert exact_match(text, f"  {text}\n") == 1.0 == exact_match(text, normalise(text))


@settings(max_examples=30)
@given(st.text("ab <>/answer1,.-", max_size=200), st.sampled_from(["all", "tag", "last_line", "last_number"]))
def test_extract_yields_a_part_of_the_text(text, how):
    found = extract(text, how)
    assert found is None or found.replace(",", "") in text.replace(",", "")


THOUGHTS = "<think>try <answer>42</answer>? no, wait"  # cut off by its length


@pytest.mark.parametrize(("text", "behind"), [
    (THOUGHTS, None), (THOUGHTS + "</think>\n<answer>43</answer>", "\n<answer>43</answer>"),
    ("<think>a</think>b<think>c</think>d", "d"), ("<think>a</think>b<think>c", None),
    ("no opening</think>d", "d"), ("", ""),
    ("<answer>4</answer>", "<answer>4</answer>"), ("<think>a<think>b</think>c", "c"), ("<think></think>", ""),
    ("</think><think>", None),
])
def test_an_answer_is_looked_for_behind_the_last_closed_thoughts(text, behind):
    assert behind_thoughts(text, THINK_TAGS) == behind and behind_thoughts(text, ()) == text
    other = text.replace("<think>", "[THINK]").replace("</think>", "[/THINK]")
    assert behind_thoughts(other, ("[THINK]", "[/THINK]")) == behind
    assert extract(text, "raw") == text
    assert behind is None or extract(text, "all") == behind.strip()


@pytest.mark.parametrize("how", ["all", "tag", "last_line", "last_number"])
def test_thoughts_that_were_cut_off_have_no_answer(how):
    for scorer in ("exact", "math_verify"):
        task = make_task("file", path="unused.jsonl", extract=how, scorer=scorer)
        answer = "<answer>42</answer>" if how == "tag" else "42"
        assert task.score(problem("42"), f"<think>{answer} no, wait</think>{answer}") == 1.0
        assert task.score(problem("42"), f"<think>{answer}") == 0.0
    gym = make_task("reasoning_gym", name="chain_sum", size=3, held_out_size=0, extract=how)
    for p in gym.problems():
        answer = gym.demonstrate(p, None)
        assert (gym.score(p, f"<think>1</think>{answer}"), gym.score(p, f"<think>{answer}")) == (1.0, 0.0)
    off = make_task("file", path="unused.jsonl", extract="last_number", think_tags=())
    assert off.score(problem("42"), "<think>42") == 1.0


@given(st.lists(st.sampled_from(["<think>", "</think>", "1", " ", "a"]), max_size=12).map("".join))
def test_what_stands_in_thoughts_never_counts(text):
    """Whatever they are: the same completion with other thoughts has the same answer."""
    answer = extract(text.replace("1", "2"), "last_number"), extract(text, "last_number")
    thoughts, closed, behind = text.rpartition("</think>")
    assert (answer[1] is None) == ("<think>" in behind or "1" not in behind)
    assert extract("<think>7 7" + closed + behind, "last_number") == (answer[1] if closed else None)


@pytest.mark.parametrize(("written", "number"), [
    ("073", 73), ("$18.00", 18), ("2.50", 2.5), ("9{,}500", 9500), ("1,234.0", 1234), ("-3", -3),
    ("\u22123", -3), ("1e3", 1000),
    ("50%", 50), ("50\\%", 50), ("3/4", 0.75), ("\\frac{3}{4}", 0.75), ("-\\dfrac12", -0.5),
    ("\\boxed{9{,}500}", 9500),
    ("\\$18", 18), ("5.", 5), ("+7", 7), ("1 000", 1000), ("1\\,000", 1000), ("1\u202f000", 1000),
    ("-$5", -5), ("$-5$", -5), ("\\(5\\)", 5), (".5", 0.5), ("-0", 0), ("1.5 \\times 10^{3}", 1500),
    ("\u20ac 5", 5),
    ("1'000", 1000), ("**42**", 42), ("\uff17\uff13", 73),
])
def test_a_number_is_compared_as_a_number_however_it_is_written(written, number):
    plain, other = str(number), str(number + 1)
    for how in ("last_number", "tag", "last_line"):
        task = make_task("file", path="unused.jsonl", extract=how)
        say = {"last_number": "So it is {} in all.", "tag": "<answer>{}</answer>",
               "last_line": "I think\n{}\n"}[how]
        assert task.score(problem(plain),
                          say.format(written)) == task.score(problem(written), say.format(plain)) == 1.0
        assert task.score(problem(other),
                          say.format(written)) == 0.0 == task.score(problem(written), say.format(other))


@pytest.mark.parametrize(("how", "reference", "text", "score"), [
    ("last_number", "0.3", "0.30000000000000004", 0.0), ("last_number", "4", "3/4", 0.0),
    ("last_number", "5", "10-$5", 1.0),
    ("all", "10000000000000000000001", "10000000000000000000000", 0.0),
    ("last_number", "18", "18 dollars", 1.0),
    ("all", "1" * 9000, "1" * 9000 + ".0", 1.0), ("all", "1" * 9000, "1" * 8999 + "2", 0.0),
    ("all", "12345", "12 345", 1.0),
    ("last_number", "2024", "on 12/25/2024", 1.0), ("last_number", "140", "120 and 130 140", 1.0),
    ("all", "1e99999999", "10e99999998", 1.0), ("last_number", "1e999999998", "1e999999999", 0.0),
    ("all", "1", "1e99999999999999999999", 0.0), ("all", "1.2.3", "1.2.30", 0.0),
    ("all", "50%", "0.5", 0.0), ("tag", "A", "<answer>a</answer>", 1.0), ("all", "nan", "NaN", 1.0),
    ("all", "0", "nan", 0.0),
])
def test_numbers_are_compared_exactly(how, reference, text, score):
    assert make_task("file", path="unused.jsonl", extract=how).score(problem(reference), text) == score


@given(st.fractions(max_denominator=10**6) | st.decimals(allow_nan=False, allow_infinity=False,
                                                         places=6).map(Fraction))
def test_a_number_has_its_value_in_every_notation(x):
    assert value(f"{x.numerator}/{x.denominator}") == value(
        f"\\frac{{{x.numerator}}}{{{x.denominator}}}") == x
    whole = int(x)
    grouped = f"{whole:,}"
    forms = grouped, grouped.replace(",", "{,}"), grouped.replace(
        ",", "\\,"), f"${grouped}$", f"{whole}.00", f"{whole}e0"
    assert {value(form) for form in forms} == {Fraction(whole)}
    assert all(value(last_number(f"of 7 it is {form}.")) == whole for form in forms)


@settings(max_examples=50)
@given(st.text("0123456789,. /$%\\{}-+eE'", max_size=30))
def test_the_last_number_of_a_text_is_a_number(text):
    number = last_number(text)
    assert number is None or (whole_number(number) == number and exact_match(number, number) == 1.0)


@pytest.mark.parametrize(("prompt", "text", "reward"), [
    ("a<think>\n", "1</think>2", 1.0), ("a<think>\n", "2", 0.0), ("a<think>", "2</think>", 0.0),
    ("a", "<think>2", 0.0),
    ("a", "2", 1.0), ("<think></think>\n\n", "2", 1.0), ("begin with <think> a", "2", 1.0),
    ("<think>", "<think>1</think>2", 1.0),
])
def test_a_prompt_may_end_inside_the_thoughts(prompt, text, reward):
    """As templates of thinking models do: their completions close a block that they did not open."""
    tokenizer = load_tokenizer("chars:" + "".join(sorted(set("<think></think> begin with a12\n"))))
    ids = np.array([*tokenizer.encode(text), tokenizer.eos_token_ids[0]])
    completion = Completion("0", 0, ids, np.zeros(len(ids)), "stop", (VersionSpan(0, len(ids), 0),))
    kept = [(Prompt(Problem("p", prompt, "2"), tuple(tokenizer.encode(prompt))), (completion,))]
    with RewardRunner(make_task("file", path="unused.jsonl", extract="last_number")) as runner:
        (group,) = scored_groups.score(kept, tokenizer, runner)
    assert group.rewards == [reward] and group.texts == (text,)


def test_long_texts_are_read_in_no_time():
    for piece in ("$", " ", "1", "1,", "1/", "\\frac", "1 000 ", "-"):
        text, before = piece * (20_000 // len(piece)), time.monotonic()
        last_number(text), whole_number(text), value(text)
        assert time.monotonic() - before < 3, text[:10]
