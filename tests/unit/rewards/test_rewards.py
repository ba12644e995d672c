"""Scorers, and the process that runs them: what hangs, forks, crashes or eats memory costs one score and
nothing more."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
import tomllib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridges.api import Completion, VersionSpan
from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.tasks import as_json, from_json, make_task
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.rewards import runner
from jaxfp8rl.rewards.runner import RewardRunner, Score
from jaxfp8rl.rewards.scoring import total
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.scored_groups import Prompt
from jaxfp8rl.training import context
from jaxfp8rl.verifiers.numbers import last_number, value, whole_number
from jaxfp8rl.verifiers.scorers import (
    THINK_TAGS,
    behind_thoughts,
    exact_match,
    extract,
    math_verify,
    normalise,
)

# What the scorer under test does is the problem's answer; the text names a file to write process ids to.
SCORER = """
import os, re, signal, subprocess, sys, time

def score(problem, text):
    act = problem.answer
    if act == "sleep":
        time.sleep(60)
    elif act == "hold_the_gil":
        re.match(r"(a+)+$", "a" * 40 + "b")
    elif act == "ignore_signals":
        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(s, signal.SIG_IGN)
        time.sleep(60)
    elif act == "fork":
        child = os.fork()
        if child:
            open(text, "w").write(f"{os.getpid()} {child}")
        time.sleep(60)
    elif act == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif act == "exit":
        os._exit(0)
    elif act == "sys_exit":
        sys.exit(1)
    elif act == "memory":
        return float(len(bytearray(1 << 40)))
    elif act == "print":
        print('{"value": 1.0, "why": "ok"}', flush=True)
        return 0.25
    elif act == "modules":
        return float(bool({"jax", "torch", "vllm"} & sys.modules.keys()))
    elif act == "raise":
        raise KeyError("no such thing")
    elif act in ("none", "nan"):
        return {"none": None, "nan": float("nan")}[act]
    elif act == "complain":
        print(text, file=sys.stderr, flush=True)
        return 1.0
    elif act == "length":
        return float(len(text))
    else:
        return float(text == act)
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    (tmp_path / "misbehaving.py").write_text(SCORER)
    monkeypatch.syspath_prepend(str(tmp_path))
    return make_task("file", path="unused.jsonl", scorer="misbehaving:score")


def problem(answer):
    return Problem(f"p-{answer}", "?", answer)


def gone(pid):
    """True once the process has ended, reaped or not."""
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as f:
                if f.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.02)
    return False


def test_answers_errors_and_undefined_values(task):
    with RewardRunner(task) as runner:
        scores = runner.score([(problem(a), "right")
                               for a in ("right", "wrong", "raise", "none", "nan", "print", "memory")])
        assert scores[:2] == [Score(1.0, "ok"), Score(0.0, "ok")]
        line = SCORER.splitlines().index('        raise KeyError("no such thing")') + 1
        assert scores[2] == Score(None, f"error: KeyError: 'no such thing' (misbehaving.py:{line})")
        assert [s.why for s in scores[3:5]] == ["none: the scorer returned None",
                                                "error: ValueError: the scorer returned nan"]
        assert scores[5] == Score(0.25,
                                  "ok") and "error: MemoryError" in scores[6].why, "it asked for a terabyte"
        assert runner.counts == {"ok": 3, "none": 1, "error": 3}
        assert runner.score([]) == []


def test_what_a_scorer_prints_at_each_call_does_not_pile_up(task, monkeypatch):
    monkeypatch.setattr(runner, "STDERR_BYTES", 4096)
    with RewardRunner(task) as r:
        sizes = []
        for _ in range(6):
            assert all(s.value == 1.0 for s in r.score([(problem("complain"), "x" * 400)] * 5))
            sizes.append(os.fstat(r._children[0]._stderr.fileno()).st_size)
    assert max(sizes) <= 4096 + 500 and min(sizes) > 0


def test_what_a_scorer_raises_most_often_is_said_once_a_batch(task, caplog):
    with RewardRunner(task) as runner:
        for acts in (["none", "raise", "a", "raise", "b"], ["a", "b"]):
            runner.score([(problem(act), "") for act in acts])
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(
        "the scorer failed at 2 of 5 completions, whose scores are undefined; most often: ")
    assert "error: KeyError: 'no such thing' (misbehaving.py:" in said


@pytest.mark.parametrize("act", ["sleep", "hold_the_gil", "ignore_signals"])
def test_a_scorer_that_hangs_is_killed_at_its_deadline_and_the_rest_goes_on(task, act):
    with RewardRunner(task, timeout_s=1.0) as runner:
        runner.score([(problem("a"), "a")])  # the start is not on the item's clock
        before, pid = time.monotonic(), runner._children[0]._process.pid
        scores = runner.score([(problem("a"), "a"), (problem(act), ""), (problem("b"), "b")])
        assert time.monotonic() - before < 10
        assert scores == [Score(1.0, "ok"), Score(None, "timeout"), Score(1.0, "ok")]
        assert gone(pid)


def test_what_a_scorer_forks_dies_with_it(task, tmp_path):
    with RewardRunner(task, timeout_s=1.0) as runner:
        assert runner.score([(problem("fork"), str(tmp_path / "pids"))]) == [Score(None, "timeout")]
        assert all(gone(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_a_scorer_that_dies_costs_one_score(task):
    acts = ["segfault", "a", "exit", "a", "sys_exit", "a"]
    with RewardRunner(task, workers=2) as runner:
        scores = runner.score([(problem(act), "a") for act in acts])
        assert scores == [Score(None, "crash"), Score(1.0, "ok")] * 3
        assert runner.counts == {"crash": 3, "ok": 3}


def test_workers_score_side_by_side(task):
    """What takes two alarms in one process takes one in two; and it starts no more of them than there are
    cores."""
    items = [(problem("sleep"), ""), (problem("a"), "a"), (problem("sleep"), "")]
    with RewardRunner(task, timeout_s=2.0, workers=3) as runner:
        runner.wait_until_ready()
        before = time.monotonic()
        assert [s.why for s in runner.score(items)] == ["timeout", "ok", "timeout"]
        assert time.monotonic() - before < 3.9
    with RewardRunner(task, workers=0) as runner:
        assert len(runner._children) == min(8, len(os.sched_getaffinity(0)))


def test_a_child_that_dies_between_batches_is_replaced(task):
    with RewardRunner(task) as runner:
        runner.score([(problem("a"), "a")])
        os.kill(pid := runner._children[0]._process.pid, 9)
        assert gone(pid)
        assert runner.score([(problem("a"), "a")] * 3) == [Score(1.0, "ok")] * 3


def test_the_child_imports_neither_jax_nor_torch_and_takes_long_and_odd_texts(task):
    with RewardRunner(task) as runner:
        texts = ["x" * 2_000_000, "\ud800 line\nbreaks\r\x00", ""]
        assert [s.value for s in runner.score([(problem("length"), t) for t in texts])] == [2_000_000, 15, 0]
        assert runner.score([(problem("modules"), "")]) == [Score(0.0, "ok")]


def test_an_interrupted_batch_leaves_no_late_answers(task, monkeypatch):
    with RewardRunner(task) as runner:
        runner.score([(problem("a"), "a")])
        collect = runner._collect

        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(runner, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            runner.score([(problem("wrong"), "a")])
        monkeypatch.setattr(runner, "_collect", collect)
        assert runner.score([(problem("a"), "a")]) == [Score(1.0, "ok")]


def test_close_leaves_no_process_and_is_final(task):
    runner = RewardRunner(task, workers=2)
    pids = [c._process.pid for c in runner._children]
    runner.close()
    runner.close()
    assert all(gone(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        runner.score([(problem("a"), "a")])


def test_children_end_when_the_learner_is_killed(task, tmp_path):
    script = textwrap.dedent(f"""
        import os, sys, threading
        sys.path.insert(0, {str(tmp_path)!r})
        from jaxfp8rl.data.problem import Problem
        from jaxfp8rl.data.tasks import make_task
        from jaxfp8rl.rewards.runner import RewardRunner
        runner = RewardRunner(make_task("file", path="x", scorer="misbehaving:score"), timeout_s=0.5)
        runner.score([(Problem("p", "?", "a"), "a")])
        child = runner._children[0]
        child.send(0, Problem("p", "?", "hold_the_gil"), "")
        print(child._process.pid, flush=True)
        os.kill(os.getpid(), 9)
    """)
    result = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False, timeout=60)
    assert gone(int(result.stdout))


@pytest.mark.usefixtures("task")
def test_a_scorer_that_cannot_be_loaded_is_a_config_error():
    for name, words in (("no_such_module:score", 'cannot load "no_such_module:score": No module named'),
                        ("misbehaving:scroe",
                         'module "misbehaving" has no function "scroe" .did you mean "score"')):
        task = make_task("file", path="x", scorer=name)
        for use in (RewardRunner.wait_until_ready, lambda runner: runner.score([(problem("a"), "a")])):
            with RewardRunner(task) as runner, pytest.raises(
                    ConfigError, match=f"^task.scorer: {words}") as e:
                use(runner)
            assert str(e.value).count("next step: ") == 1


def test_a_run_knows_of_it_before_its_engine_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(context, "build_engine", lambda *_: pytest.fail("it takes minutes"))
    (tmp_path
     / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}+1=", "answer": "1"}}\n' for i in range(100)))
    task = {"kind": "file", "path": str(tmp_path / "rows.jsonl"), "options": "{}",
            "scorer": "no_such_module:score"}
    words = [word for key, value in task.items() for word in (f"--task.{key}", value)]
    with pytest.raises(ConfigError, match='cannot load "no_such_module:score": No module named'):
        context.build_run(load_config("demo", [*words, "--rollout.prompts_per_step", "8"]))


def test_cheap_tasks_need_no_process():
    task = make_task("arithmetic", max_operand=5)
    with RewardRunner(task) as runner:
        p = task.problems()[0]
        assert runner._children == []
        assert runner.score([(p, p.answer), (p, "no")]) == [Score(1.0, "ok"), Score(0.0, "ok")]


@pytest.mark.parametrize(("name", "extract", "right", "options"), [
    ("chain_sum", "last_number", "It is {}.", ""),
    ("time_intervals", "last_line", "{}", "min_date = 2020-01-01\nmax_time = 18:30:00"),
])
def test_reasoning_gym_is_scored_in_the_child(name, extract, right, options):
    """Dates and times, as a config has them, are no less the generator's there."""
    task = make_task("reasoning_gym", name=name, size=5, held_out_size=0, extract=extract,
                     **tomllib.loads(options))
    assert from_json(as_json(task)) == task
    items = [(p, text) for p in task.problems()
             for text in (right.format(p.answer), "I do not know", p.answer + "1")]
    with RewardRunner(task) as runner:
        scores = runner.score(items)
        assert {s.why for s in scores} == {"ok"}
        assert [s.value for s in scores] == [task.score(*item) for item in items]
        assert [s.value for s in scores[::3]] == [1.0] * 5


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


OWN = """
import json, decimal, fractions, numpy
KINDS = {"true": True, "int": 3, "numpy": numpy.float32(0.5), "array": numpy.array(0.25), "decimal": decimal.Decimal("0.5"),
         "fraction": fractions.Fraction(1, 4), "big": 1e6, "minus": -2.0, "none": None}
BAD = {"text": "1.0", "dict": {"score": 1.0}, "nan": float("nan"), "inf": float("inf"), "list": [1.0], "two": numpy.ones(2)}

def kinds(problem, text):
    return KINDS[text] if text in KINDS else BAD[text] if text in BAD else 1.0

def parse(problem, text):
    return float(json.loads(text)["x"] == json.loads(problem.answer)["x"])

def split(problem, text):
    return float(text.split("####")[1] == problem.answer)

def meta(problem, text):
    return problem.meta["nowhere"]

def away(problem, text):
    if text == "away":
        raise ConnectionError("the judge is away")
    return 1.0

def nested(problem, text):
    import ast
    return float(ast.literal_eval(text) == 1)

def brief(problem, text):
    return None if text == "skip" else 1 / len(text)

def thoughts(problem, text):
    return float("<think>" in text)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """judge(function, reference, *texts) -> scores by that function of a module beside the config."""
    (tmp_path / "own_rewards.py").write_text(OWN)

    def scores(function, reference, *texts):
        task = make_task("file", path="unused.jsonl", scorer=f"own_rewards:{function}",
                         scorer_folder=str(tmp_path))
        with RewardRunner(task) as r:
            return r.score([(problem(reference), text) for text in texts])

    return scores


def test_what_a_function_may_return(own):
    good = own("kinds", "ok", "true", "int", "numpy", "array", "decimal", "fraction", "big", "minus", "none")
    assert [s.value for s in good] == [1.0, 3.0, 0.5, 0.25, 0.5, 0.25, 1e6, -2.0,
                                       None] and good[-1].why.startswith("none")
    bad = own("kinds", "ok", "text", "dict", "nan", "inf", "list", "two")
    assert [s.value for s in bad] == [0.0] * 6 and all(s.why.startswith("malformed: ")
                                                       for s in bad), "it takes the reference"
    for text in ("text", "nan"):
        (score,) = own("kinds", text, text)
        assert score.value is None and score.why.startswith("error: "), "it takes none"


def test_what_the_model_wrote_is_wrong_and_not_undefined_where_the_scorer_breaks_on_it(own):
    texts = ["{}", "null", "[", "1e999", "", "[" * 100_000, '{"x": 7}']
    scores = own("parse", '{"x": 7}', *texts)
    assert [s.value for s in scores] == [0.0] * 6 + [1.0]
    assert [s.why.split(":")[1].strip()
            for s in scores[:2]] == ["KeyError", "TypeError"] and "RecursionError" in scores[5].why
    assert [s.value for s in own("nested", "1", "-" * 100_000 + "1",
                                 "1")] == [0.0, 1.0], "Python's parser has no memory for it"


def test_a_scorer_that_takes_no_reference_is_judged_by_what_else_it_scores(own):
    """The reference of GSM8K's form "#### 72" is 72 alone: it breaks on that, too."""
    scores = own("split", "72", "so\n####72", "####7", "72")
    assert [s.value for s in scores] == [1.0, 0.0, 0.0] and scores[2].why.startswith("malformed: IndexError")
    assert [s.value for s in own("split", "72", "72", "71")] == [None, None], "nothing says that it works"


def test_a_broken_scorer_is_undefined_and_names_its_line(own, caplog):
    scores = own("meta", "1", "1", "2")
    assert [s.value for s in scores] == [None, None]
    line = OWN.splitlines().index('    return problem.meta["nowhere"]') + 1
    assert f"(own_rewards.py:{line})" in scores[0].why and f"own_rewards.py:{line}" in caplog.text
    assert [s.value for s in own("away", "1", "away", "2")] == [None, 1.0], "the model has not written that"


def test_rewards_with_names_are_summed_by_weight(tmp_path):
    (tmp_path / "own_rewards.py").write_text(OWN)
    rewards = [{"name": "right", "scorer": "exact", "extract": "tag"},
               {"name": "brief", "scorer": "own_rewards:brief", "weight": 0.5},
               {"name": "form", "scorer": "own_rewards.py:thoughts", "weight": -0.25, "extract": "raw"}]
    task = make_task("file", path="unused.jsonl", rewards=rewards, scorer_folder=str(tmp_path))
    assert from_json(as_json(task)) == task
    texts = ["<think>a</think><answer>42</answer>", "ab", "skip", "<think>skip</think>", ""]
    with RewardRunner(task, workers=2) as r:
        scores = r.score([(problem("42"), text) for text in texts])
    brief = 1 / len("<answer>42</answer>")
    assert [s.value for s in scores] == pytest.approx([1 + 0.5 * brief - 0.25, 0.25, 0.0, -0.25, 0.0])
    assert scores[0].parts == {"right": 1.0, "brief": pytest.approx(brief), "form": 1.0}
    assert scores[2].parts == {"right": 0.0, "brief": None, "form": 0.0}
    assert scores[4].why.startswith("malformed: ZeroDivisionError") and "brief" in scores[4].why
    group = scored_groups.Group(None, (), tuple(texts), **scored_groups._rewards(scores))
    assert scored_groups.named_means([group]) == pytest.approx(
        {"reward/right/mean": 0.2, "reward/brief/mean": (brief + 0.5) / 4, "reward/form/mean": 0.4})
    assert group.malformed == 2


def test_a_part_that_fails_leaves_the_whole_undefined():
    parts = {"a": Score(1.0, "ok"), "b": Score(None, "timeout"),
             "c": Score(None, "none: the scorer returned None")}
    assert total(parts, {"a": 1, "b": 1, "c": 1}) == Score(None, "timeout (b)",
                                                           {"a": 1.0, "b": None, "c": None})
    assert total({"a": parts["c"], "b": parts["c"]}, {"a": 1, "b": 1}).value is None


@pytest.mark.parametrize(("toml", "words"), [
    ('[[task.rewards]]\nname = "a"\nscorer = "exakt"', 'unknown scorer "exakt" .did you mean "exact"'),
    ('[[task.rewards]]\nname = "A b"\nscorer = "exact"', "task.rewards.0.name"),
    ('[[task.rewards]]\nname = "a"\nscorer = "exact"\nwieght = 2.0', 'unknown key .did you mean "weight"'),
    ('scorer = "exact"\n[[task.rewards]]\nname = "a"\nscorer = "exact"', "one of the two"),
    ('[[task.rewards]]\nname = "a"\nscorer = "exact"\n[[task.rewards]]\nname = "a"\nscorer = "exact"',
     "a name of its own"),
    ('scorer_folder = "x"', "no scorer of your own"), ('think_tags = ["<a>"]', "what opens a block"),
])
def test_rewards_that_cannot_be_are_refused(tmp_path, toml, words):
    keys, bracket, tables = toml.partition("[[")
    demo = (Path(__file__).parents[3] / "configs" / "demo.toml").read_text(encoding="utf-8")
    text = demo.replace('kind = "arithmetic"',
                        f'kind = "file"\npath = "x.jsonl"\n{keys}') + "\n" + bracket + tables
    (tmp_path / "c.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        cfg = load_config(str(tmp_path / "c.toml"), ["--task.options", "{}"])
        make_task(cfg.task)


def test_a_scorers_module_is_found_beside_the_config_and_again_from_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    for name in ("project/beside_it", "in_the_working_directory", "project/numbers"):
        (tmp_path / f"{name}.py").write_text("def score(problem, text):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path)
    demo = Path(__file__).parents[3] / "configs" / "demo.toml"
    (tmp_path / "project" / "c.toml").write_text(demo.read_text())
    for scorer, elsewhere in (("beside_it:score", True), ("numbers.py:score", True),
                              ("in_the_working_directory:score", False),
                              (f"{tmp_path}/project/beside_it.py:score", True)):
        words = ["--task.kind", "file", "--task.path", "x.jsonl", "--task.options", "{}", "--task.scorer",
                 scorer]
        cfg = load_config("project/c.toml", words)
        assert cfg.task.scorer_folder == str(tmp_path / "project")
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "config.toml").write_text(dump_config(cfg))
        resumed = load_config(str(tmp_path / "run" / "config.toml"))
        assert resumed == cfg
        for place, found in ((tmp_path, True), (tmp_path / "run", elsewhere)):
            monkeypatch.chdir(place)
            with RewardRunner(make_task(resumed.task)) as r:
                if found:
                    assert r.score([(problem("1"), "1")]) == [Score(0.5, "ok")]
                else:
                    with pytest.raises(ConfigError, match=f"looked in {tmp_path}/project, PYTHONPATH"):
                        r.wait_until_ready()
        monkeypatch.chdir(tmp_path)
    assert load_config("demo").task.scorer_folder == ""


@pytest.mark.parametrize(("body", "words"), [
    ("def score(text):\n    return 1.0", "cannot be called with .problem, text.: too many positional"),
    ("async def score(problem, text):\n    return 1.0", "is async"), ("score = 3", "is no function but int"),
    ("import nothing_of_the_kind", "No module named 'nothing_of_the_kind'"), ("def score(:", "SyntaxError"),
    ("1 / 0", "broken.py:1"),
])
def test_a_module_that_is_no_scorer_says_why(tmp_path, body, words):
    (tmp_path / "broken.py").write_text(body + "\n")
    task = make_task("file", path="x", scorer="broken:score", scorer_folder=str(tmp_path))
    with RewardRunner(task) as r, pytest.raises(ConfigError, match=words):
        r.wait_until_ready()
