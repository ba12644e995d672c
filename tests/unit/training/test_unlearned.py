"""An update with nothing to learn from says why: each cause by its name, with prompt, completion and answer,
and what to do."""

from __future__ import annotations

import numpy as np
import pytest

from bridges.api import Completion
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.data.packing import pack
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.rollout import scored_groups
from jaxfp8rl.rollout.samples import kept
from jaxfp8rl.rollout.scored_groups import Group, Prompt, Rollouts
from jaxfp8rl.run.run_directory import RunDirectory
from jaxfp8rl.training.unlearned import cause, equal_rewards

NAN = float("nan")


def sampled(*rewards, finish: str = "stop") -> Rollouts:
    """A group for each list of rewards."""
    groups = []
    for g, values in enumerate(rewards):
        of = [Completion(f"{g}", i, np.array([4, 5]), np.zeros(2, np.float32), finish, ())
              for i in range(len(values))]
        texts = tuple(f"text {g}.{i}" for i in range(len(values)))
        groups.append(Group(Prompt(Problem(f"p{g}", f"3+{g}=", f"answer {g}"), (1, 2)), tuple(of), texts,
                            np.array(values)))
    return Rollouts(tuple(groups), (), tuple(groups))


def why(batch: Rollouts, metrics=(), **options):
    words = [w for k, v in options.items() for w in (f"--{k.replace('__', '.')}", str(v))]
    cfg = load_config("demo", words)
    samples = sum(scored_groups.to_samples(batch.chosen, cfg.loss, cfg.rollout.max_new_tokens), [])
    return cause(batch, pack(samples, 8, 2, 4), cfg, dict(metrics))


EQUAL = "use problems that are neither too easy nor too hard"
CASES = [
    (sampled([0.0, 0.0], [0.0, NAN]), {}, "every reward is 0", "extraction and the scorer"),
    (sampled([0.0, 0.0], finish="length"), {}, "every reward is 0", "raise rollout.max_new_tokens (now 4)"),
    (sampled([1.0, 1.0], [1.0, 1.0]), {}, "every reward is 1", EQUAL),
    (sampled([-0.5, -0.5]), {}, "every reward is -0.5", EQUAL),
    (sampled([1.0, 1.0], [0.0, 0.0]), {}, "the rewards are equal in every group",
     "raise rollout.samples_per_prompt"),
    (sampled([1.0, 0.0], finish="length"), {"loss__mask_cut": "true"},
     "every completion was cut at 4 tokens and left out",
     "--loss.mask_cut false"),
    (sampled([NAN, NAN]), {}, "no completion has a score", "docs/tasks.md"),
    (sampled([1.0, 0.0]), {}, "the correction rejected every token that had an advantage",
     "docs/corrections.md"),
]


@pytest.mark.parametrize("batch,options,text,way_on", CASES, ids=[c[2] for c in CASES])
def test_each_cause_is_told_from_the_others(batch, options, text, way_on):
    found = why(batch, [("correction/rejected_fraction", 1.0), ("mismatch/token_mult_prob_error", 3.0)],
                **options)
    assert found.text.startswith(text) and way_on in found.next_step
    if "correction" in text:
        assert "correction/rejected_fraction 1, mismatch/token_mult_prob_error 3" in found.detail
    else:
        assert all(x in found.detail for x in ("3+0=", "text 0.0", "answer 0", "with reward"))


def test_a_group_that_dynamic_sampling_did_not_find_is_no_rejection():
    rounds = sampled([0.0, 0.0], [1.0, 1.0])
    assert why(Rollouts(rounds.groups, (), ())).text == "the rewards are equal in every group"


def test_rewards_that_differ_are_not_called_equal():
    cfg = load_config("demo", [])
    assert equal_rewards(sampled([0.0, 0.0], [0.0, 1.0]), cfg) is None
    assert equal_rewards(sampled([0.0, 0.0], [NAN, NAN]), cfg).text == "every reward is 0"


def test_the_example_is_shown_once(tmp_path, capsys):
    found = why(sampled([0.0, 0.0]))
    with RunDirectory(load_config("demo", ["--run.dir", str(tmp_path)]), resume=False) as run:
        for step in (1, 2):
            run.note(f"step {step}: no update: {found.text}", found.detail, found.text)
    notes = (tmp_path / "notes.txt").read_text()
    for said in (notes, capsys.readouterr().out):
        assert said.count("every reward is 0") == 2 and said.count("answer 0") == said.count(
            "next step: ") == 1


# --- what is kept to be looked at


ALL = ["0.0", "1.1", "2.0"]


@pytest.mark.parametrize("count,ids", [(0, []), (1, ALL[:1]), (2, ALL[1:]), (3, ALL), (9, ALL)])
def test_the_best_and_the_worst_of_a_step_are_kept(count, ids):
    batch = sampled([0.5, NAN], [0.2, 0.9], [0.1, 0.3])
    assert [g.texts[i].removeprefix("text ") for g, i in kept(batch.groups, count)] == ids


def test_the_first_are_kept_where_they_are_the_best_and_the_worst_already():
    assert [i for _, i in kept(sampled([1.0, 0.0], [0.0, 1.0], [0.5, 0.5]).groups, 3)] == [0, 0, 0]
    assert [g.texts[i] for g, i in kept(sampled([0.5, 0.0, 1.0]).groups, 2)] == ["text 0.1", "text 0.2"]
