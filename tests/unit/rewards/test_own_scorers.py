"""A user's own scorers: what they may return, what breaks them, and where their module is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from reward_cases import problem

from jaxfp8rl.config.toml import dump_config, load_config
from jaxfp8rl.data.tasks import as_json, from_json, make_task
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.rewards.runner import RewardRunner, Score
from jaxfp8rl.rewards.scoring import total
from jaxfp8rl.rollout import scored_groups

OWN = """
import json, decimal, fractions, numpy
KINDS = {"true": True, "int": 3, "numpy": numpy.float32(0.5), "array": numpy.array(0.25),
         "decimal": decimal.Decimal("0.5"), "fraction": fractions.Fraction(1, 4), "big": 1e6, "minus": -2.0,
         "none": None}
BAD = {"text": "1.0", "dict": {"score": 1.0}, "nan": float("nan"), "inf": float("inf"), "list": [1.0],
       "two": numpy.ones(2)}

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
     "needs a unique name"),
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
    ("async def score(problem, text):\n    return 1.0", "is async"),
    ("score = 3", "is not a function but int"),
    ("import nothing_of_the_kind", "No module named 'nothing_of_the_kind'"), ("def score(:", "SyntaxError"),
    ("1 / 0", "broken.py:1"),
])
def test_a_module_that_is_no_scorer_says_why(tmp_path, body, words):
    (tmp_path / "broken.py").write_text(body + "\n")
    task = make_task("file", path="x", scorer="broken:score", scorer_folder=str(tmp_path))
    with RewardRunner(task) as r, pytest.raises(ConfigError, match=words):
        r.wait_until_ready()
