"""The order of problems: a permutation an epoch, resumable at any point, refused on other data."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.processes import printed
from jaxfp8rl.data.dataset import PrepareReport, PromptStream, contents, fingerprint, prepare
from jaxfp8rl.data.permutation import permutation
from jaxfp8rl.data.problem import Problem
from jaxfp8rl.data.tasks import make_task
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.errors import CheckpointError, DataError
from jaxfp8rl.training import resume


def problems(n):
    return [Problem(f"p{i}", f"{i}=", str(i)) for i in range(n)]


@given(st.integers(1, 200), st.integers(0, 2**63), st.integers(0, 1000))
def test_permutation_is_one(n, seed, epoch):
    assert sorted(permutation(n, seed, epoch)) == list(range(n))


def test_permutation_is_pinned_and_uniform():
    # a change here would reorder every resumed run
    assert permutation(8, 1, 0).tolist() == [3, 5, 2, 7, 0, 6, 1, 4]
    first = np.bincount([permutation(4, seed, 0)[0] for seed in range(2000)], minlength=4)
    assert (abs(first - 500) < 100).all()
    assert permutation(50, 0, 0).tolist() != permutation(50, 0, 1).tolist() != permutation(50, 1, 0).tolist()


@given(st.integers(1, 12), st.lists(st.integers(0, 9), max_size=8), st.integers(0, 2**31))
def test_every_epoch_shows_every_problem_once(n, batches, seed):
    stream = PromptStream(problems(n), seed)
    drawn = [p.id for size in batches for p in stream.next(size)]
    assert len(drawn) == sum(batches)
    for start in range(0, len(drawn) - n + 1, n):
        assert len(set(drawn[start:start + n])) == n


@given(st.integers(1, 12), st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 8),
       st.integers(0, 2**31))
def test_resuming_equals_never_stopping(n, batches, stop, seed):
    whole, first = PromptStream(problems(n), seed), PromptStream(problems(n), seed)
    expected = [whole.next(size) for size in batches]
    got = [first.next(size) for size in batches[:stop]]
    second = PromptStream.from_state(problems(n), json.loads(json.dumps(first.state())))
    assert got + [second.next(size) for size in batches[stop:]] == expected


def test_resuming_on_other_data_is_refused():
    state = PromptStream(problems(5), 0).state()
    changed = [*problems(4), Problem("p4", "5=", "4")]
    for other in (problems(6), problems(5)[::-1], changed):
        with pytest.raises(CheckpointError, match="taken on other problems"):
            PromptStream.from_state(other, state)
    assert fingerprint(problems(5)) == fingerprint([(p, (1,)) for p in problems(5)])


def test_answers_and_tokens_are_part_of_what_is_learned_from():
    """Tokens stand for all of a tokenizer that its vocabulary does not: merges, chat template."""
    prompts = [(p, (1, 2)) for p in problems(3)]
    answered = [*prompts[:2], (dataclasses.replace(prompts[2][0], answer="7"), (1, 2))]
    moved = [(prompts[0][0], (1, 2, 1)), (prompts[1][0], (2,)), prompts[2]]
    assert len({contents(x) for x in (prompts, prompts[:2], answered, moved)}) == 4
    assert contents(answered, answers=False) == contents(prompts,
                                                         answers=False) != contents(moved, answers=False)


@pytest.mark.parametrize("differing", ["problems", "held-out problems"])
def test_a_run_is_not_resumed_on_other_answers(differing, monkeypatch):
    monkeypatch.setattr(resume, "_like", lambda parts: None)
    kept = {"problems": "a", "held-out problems": "b"}
    parts = SimpleNamespace(tokenizer=SimpleNamespace(fingerprint=lambda: "t"),
                            contents=kept | {differing: "c"})
    run = SimpleNamespace(phase=print, restore=lambda like: (None, {"tokenizer": "t", "contents": kept}, 3))
    with pytest.raises(CheckpointError, match=f"taken on other {differing}: their answers"):
        resume.restore(parts, run)


@pytest.mark.parametrize("damage",
                         [{"seed": None}, {"position": 6}, {"position": -1}, {"epoch": -1}, {"epoch": "x"}])
def test_a_damaged_state_is_refused(damage):
    with pytest.raises(CheckpointError, match="damaged"):
        PromptStream.from_state(problems(5), PromptStream(problems(5), 0).state() | damage)
    with pytest.raises(CheckpointError, match="damaged"):
        PromptStream.from_state(problems(5), {})


def test_no_problems_is_an_error():
    with pytest.raises(DataError, match="no problems"):
        PromptStream([], 0)


def test_prepare_encodes_and_limits():
    tokenizer = load_tokenizer("chars:0123456789+=")
    good = make_task("arithmetic", max_operand=9).problems()
    kept, report = prepare(good, tokenizer, 4)
    assert report == PrepareReport(len(good), 0, 0, 4)
    assert all(tokenizer.decode(tokens) == p.prompt for p, tokens in kept)
    bad = [Problem("long", "1+1+1=", "3"), Problem("void", "", "3")]
    with pytest.raises(DataError) as e:
        prepare([*good, *bad], tokenizer, 4)
    assert '"long": 6 tokens, the limit is 4' in str(e.value) and '"void": the prompt has no tokens' in str(
        e.value)
    first = 'problem "long": 6 tokens, the limit is 4'
    assert prepare([*good, *bad], tokenizer, 4,
                   skip=True) == (kept, PrepareReport(len(good), 1, 1, 4, first=first))
    refused = prepare([*good, Problem("odd", "two", "2")], tokenizer, 4, skip=True)[1]
    assert refused.refused == 1 and "cannot encode 'two'" in refused.first
    with pytest.raises(DataError, match="2 of 2 prompts"):
        prepare(bad, tokenizer, 4, skip=True)


def test_the_data_package_is_cheap_to_import():
    code = (
        "import sys, jaxfp8rl.data.tasks, jaxfp8rl.data.dataset, jaxfp8rl.data.tokenizer, "
        "jaxfp8rl.rewards.runner;heavy = {'jax', 'torch', 'vllm', 'transformers', 'tokenizers', "
        "'reasoning_gym', 'sympy', 'pyarrow', 'jinja2'};print(sorted(heavy & sys.modules.keys()))")
    assert printed(code) == "[]\n"
