"""Drafts in a cheap format that go on in a precise one: what a completion says of its tokens and of its
draft's chance is what it takes for exact means."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from bridges.api import EngineFormats, GenRequest, SamplingParams
from bridges.engines.embedded_engine import EmbeddedEngine, EngineModel
from jaxfp8rl.losses.selection import Selection
from jaxfp8rl.rollout.explore import Explored, Explorer

pytestmark = pytest.mark.usefixtures("quick_compile")
WORDS, LONG, SHORT, SAMPLES, TAKEN = 4, 6, 3, 6, 3
P, Q = (np.random.default_rng(seed).dirichlet(np.ones(WORDS), WORDS) for seed in (1, 2))
Q = 0.6 * P + 0.4 * Q  # of the cheap engine


def engine(transitions: np.ndarray) -> EmbeddedEngine:
    """A model whose next word depends on the last."""
    hidden = lambda tokens: jnp.log(jnp.asarray(transitions, jnp.float32))[tokens]
    made = EmbeddedEngine(EngineModel(
        manifest=(), assemble=dict, init_cache=lambda n: jnp.zeros((1, n, 16), jnp.uint32),
        prefill=lambda params, tokens, positions, segments, pages, cache: (hidden(tokens), cache),
        decode=lambda params, tokens, positions, table, cache: (hidden(tokens), cache),
        logits=lambda params, h: h, formats=EngineFormats(*["float32"] * 4), vocab_size=WORDS, page=16),
        max_model_len=16, max_num_seqs=2048)
    made.load({})
    made.commit(1, "")
    return made


def explored(groups: int, by: Selection, kept: float = 1.0,
             stops: tuple[int, ...] = ()) -> tuple[list[list[Explored]], Explorer]:
    """Completions of one prompt. A draft is worth 1 if the word 2 is in it."""
    score = lambda drafts: [np.array([float(2 in c.token_ids) for c in of]) for _, of in drafts]
    explorer = Explorer(engine(Q), engine(P), score, SAMPLES, SHORT, kept, by)
    asked = [GenRequest(str(i), (1,), SamplingParams(LONG, stop_token_ids=stops), TAKEN, i)
             for i in range(groups)]
    return explorer.generate(asked), explorer


def test_a_draft_without_a_score_is_no_draft_worth_nothing():
    """Among rewards below 0 a 0 would be the best."""
    rewards = []

    def score(drafts):
        rewards.extend(np.array([np.nan if 2 in c.token_ids else -1.0 - c.token_ids[0] for c in of])
                       for _, of in drafts)
        return rewards

    explorer = Explorer(engine(Q), engine(P), score, SAMPLES, SHORT, 1.0, Selection(by="best_worst"))
    groups = explorer.generate([GenRequest(str(i), (1,), SamplingParams(LONG), TAKEN, i) for i in range(40)])
    missing = [int(np.isnan(r).sum()) for r in rewards]
    gone_on = [sum(2 in c.token_ids[:SHORT] for c in g) for g in groups]
    enough = [bool(m) and m <= SAMPLES - TAKEN for m in missing]
    assert sum(enough) > 5 and not any(n for n, e in zip(gone_on, enough) if e)
    assert all(n for n, m in zip(gone_on, missing) if m > SAMPLES - TAKEN)
    assert explorer.metrics()["explore/undefined"] == sum(missing)


def logp(table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.log(table[np.concatenate([[1], tokens[:-1]]), tokens])


def test_each_token_has_the_log_probability_of_the_engine_that_drew_it():
    groups, explorer = explored(40, Selection(by="best_worst"), kept=0.7, stops=(3,))
    for c in (c for group in groups for c in group):
        drafted, whole = c.drafted, logp(P, c.token_ids)
        np.testing.assert_allclose(c.logprobs[:drafted], logp(Q, c.token_ids)[:drafted], rtol=1e-5)
        np.testing.assert_allclose(c.logprobs[drafted:], whole[drafted:], rtol=1e-5)
        assert c.problem() is None and drafted < len(c.token_ids) <= LONG and c.finish_reason in ("stop",
                                                                                                  "length")
        assert [(s.start, s.stop) for s in c.version_spans] == [(0, len(c.token_ids))]
    assert {c.drafted for group in groups for c in group} == {0, 1, 2}
    told = explorer.metrics()
    assert told["explore/precise_tokens"] == sum(len(c.token_ids) - c.drafted for g in groups for c in g)
    assert 0 < told["explore/kept_fraction"] < 1 and told["explore/unreachable"] == 0


def test_the_metrics_of_a_step_are_those_of_all_its_rounds():
    """Dynamic sampling draws again within a step."""
    groups, explorer = explored(3, Selection(by="best_worst"))
    asked = [GenRequest(f"again/{i}", (1,), SamplingParams(LONG), TAKEN, 90 + i) for i in range(2)]
    again = explorer.generate(asked)
    told, count = explorer.metrics(), lambda f: sum(f(c) for g in [*groups, *again] for c in g)
    assert told["explore/tokens"] == 5 * SAMPLES * SHORT
    assert told["explore/precise_tokens"] == count(lambda c: len(c.token_ids) - c.drafted)
    assert told["explore/kept_fraction"] == count(lambda c: c.drafted) / told["explore/tokens"]
    assert explorer.metrics() == {}


@pytest.mark.slow
@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_weighed_by_inclusion_and_correction_a_mean_is_the_precise_policys(kept):
    """The mean of a function of the completion over those selected: with both weights it is the policy's,
    without either it is not. The share of last words that are 2 depends on the draft, on which the choice
    does, too."""
    groups, _ = explored(2500 if kept == 1 else 10000, Selection(by="best_worst"), kept)
    value = np.array([[float(c.token_ids[-1] == 2) + float(2 in c.token_ids[:SHORT]) for c in g]
                      for g in groups])
    ratio = np.array([[np.exp((logp(P, c.token_ids) - c.logprobs).sum()) for c in g] for g in groups])
    chance = np.array([[c.inclusion for c in g] for g in groups])
    paths = np.array(np.meshgrid(*[range(WORDS)] * LONG)).reshape(LONG, -1).T
    weight = np.exp([logp(P, path).sum() for path in paths])
    want = (weight * (1.0 * (paths[:, -1] == 2) + (paths[:, :SHORT] == 2).any(1))).sum()
    wrong = {}
    for name, w in {"both": ratio / chance, "inclusion alone": 1 / chance, "correction alone": ratio}.items():
        of_group = (w * value).mean(1)
        wrong[name] = abs(of_group.mean() - want) / (of_group.std() / np.sqrt(len(groups)))
    assert wrong["both"] < 3.5 and min(wrong["inclusion alone"], wrong["correction alone"]) > 4, wrong
    np.testing.assert_allclose((1 / chance).mean(), 1, atol=0.05)
    assert chance.std() > 0.1


@pytest.mark.slow
def test_taking_any_of_as_many_changes_no_weight_and_seeds_repeat():
    groups, _ = explored(20, Selection(by="random"))
    again, _ = explored(20, Selection(by="random"))
    assert {c.inclusion for g in groups for c in g} == {1.0}
    assert [c.token_ids.tolist() for g in groups for c in g] == [c.token_ids.tolist() for g in again
                                                                 for c in g]
