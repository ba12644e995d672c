"""Speculation in the embedded engine: what is drafted changes how many steps it takes, and nothing else."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from test_continuous_batching import MAX_LEN, MODEL, drawn, requests

from bridges.api import EngineFormats, GenRequest, SamplingParams
from bridges.engines import speculate
from bridges.engines.embedded_engine import EmbeddedEngine, EngineModel
from bridges.engines.speculate import Lanes
from bridges.order import HOW
from jaxfp8rl.config.toml import load_config
from jaxfp8rl.training import publishing
from jaxfp8rl.training.context import build_run

pytestmark = pytest.mark.usefixtures("quick_compile")
WORDS, DRAFTS = 5, 3


def lanes(helps, ahead, fed) -> Lanes:
    return Lanes(*(jnp.array(x, jnp.int32) for x in (helps, ahead, fed)), jnp.zeros(3, jnp.int32))


def test_tokens_are_taken_up_to_the_first_wrong_draft_or_the_end():
    """Rows 0, 1 and 2 live; lanes 3 to 7 help them with drafts 1 and 2."""
    helping = lanes([0, 1, 2, 0, 1, 2, 0, 1], [0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 10, 11, 12, 20, 21])
    drew = jnp.array([10, 11, 99, 20, 77, 5, 30, 31])
    live = jnp.arange(8) < 3
    none = jnp.zeros(8, bool)
    found, takes, last = speculate.accepted(drew, none, helping, live, 2)
    # all; the second draft was wrong; the first was
    assert found[:3].tolist() == [[0, 3, 6], [1, 4, 8], [2, 8, 8]]
    assert takes.tolist() == [3, 2, 1, 0, 0, 0, 0, 0] and last[:3].tolist() == [6, 4, 2]
    ended, takes, _ = speculate.accepted(drew, none.at[3].set(True), helping, live, 2)
    assert takes[:3].tolist() == [2, 2, 1] and ended[0].tolist() == [0, 3, 8]


def test_idle_lanes_are_shared_out_evenly_within_what_a_row_may_write_and_knows():
    live = jnp.array([0, 1, 0, 0, 1, 0, 0, 0], bool)
    some = functools.partial(jnp.full, 8)
    helps, ahead = speculate.share_out(live, some(9), some(9), 3)
    assert helps.tolist() == [1, 1, 4, 1, 4, 4, 1, 4] and ahead.tolist() == [1, 0, 1, 2, 0, 2, 3, 3]
    _, ahead = speculate.share_out(live, some(9).at[1].set(1), some(9).at[4].set(2), 3)
    assert ahead.tolist() == [1, 0, 1, 0, 0, 2, 0, 0]
    assert not speculate.share_out(jnp.zeros(8, bool), some(9), some(9), 3)[1].any()


def test_drafts_are_what_followed_the_longest_and_latest_same_words():
    tokens = jnp.array([[1, 2, 3, 9, 8, 1, 2, 4, 7, 1, 2, 0], [6, 3, 1, 2, 5, *[0] * 7], [7, 1, 2, *[6] * 9]])
    counts = jnp.array([11, 5, 4])
    find = jax.jit(speculate.drafts, static_argnums=3)
    of = lambda *among: [x.tolist() for x in find(tokens, counts, jnp.array([[*among, 3][:2]]), 3)]
    assert of(0) == [[[4, 7, 1]], [3]]  # the later of the two places behind 1, 2
    assert of(0, 2)[0] == [[6, 6, 6]] and of(0, 2)[1] == [1]  # behind 7, 1, 2, of which one is drawn
    assert of(1)[1] == [0] and of(1, 0)[1] == [0], "nothing followed 2, 5"
    assert of(3)[1] == [0], "no sequence is in the row"


@pytest.mark.slow
def test_tokens_behind_drafts_have_the_distribution_of_the_policy():
    """A million tokens of a chain whose next word depends on the last: transitions against the chain's,
    chi-squared. Half the drafts are likely words, half are any."""
    chain = np.random.default_rng(0).dirichlet(np.ones(WORDS), WORDS)
    logp = jnp.log(jnp.asarray(chain, jnp.float32))
    rows, most = 2048, 2
    live = jnp.arange(rows * (most + 1)) < rows
    own = jnp.arange(rows * (most + 1))
    helping = Lanes(own % rows, own // rows, own, jnp.zeros(3, jnp.int32))

    def step(last, key):
        keys = jax.random.split(key, 3)
        likely, guessed, drafts = jnp.argmax(logp, 1), jax.random.randint(keys[0], (most, rows), 0,
                                                                          WORDS), [last]
        for j in range(most):
            drafts.append(jnp.where(jax.random.bernoulli(keys[1], 0.5, (rows,)), likely[drafts[-1]],
                                    guessed[j]))
        fed = jnp.concatenate(drafts)
        drew = jax.random.categorical(keys[2], logp[fed])
        found, takes, lane = speculate.accepted(drew, jnp.zeros_like(live), helping._replace(fed=fed), live,
                                                most)
        taken = jnp.zeros_like(live).at[found].set(True, mode="drop")
        return drew[lane[:rows]], (jnp.zeros((WORDS, WORDS)).at[fed, drew].add(taken), takes[:rows].mean())

    _, (counts, mean) = jax.lax.scan(step, jnp.zeros(rows, int), jax.random.split(jax.random.key(1), 400))
    counts = np.asarray(counts, float).sum(0)
    assert counts.sum() > 10**6 and 1.2 < mean.mean() < 2.5
    expected = chain * counts.sum(1, keepdims=True)
    chi = ((counts - expected) ** 2 / expected).sum()
    assert stats.chi2.sf(chi, WORDS * (WORDS - 1)) > 1e-3
    assert stats.chi2.sf(((counts - np.roll(expected, 1, 1)) ** 2 / np.roll(expected, 1, 1)).sum(), 20) < 1e-9


def engine(rows: int, drafts: int, pages: int | None = None, model: EngineModel = MODEL,
           order: HOW = "fifo") -> EmbeddedEngine:
    made = EmbeddedEngine(model, max_model_len=MAX_LEN, max_num_seqs=rows, pages=pages, drafts=drafts,
                          order=order)
    made.load({})
    made.commit(1, "")
    return made


@pytest.mark.parametrize("rows, pages, seeds",
                         [(24, None, 1), pytest.param(24, None, 6, marks=pytest.mark.slow),
                                                pytest.param(8, 11, 6, marks=pytest.mark.slow)])
def test_completions_are_those_without_speculation_in_bits(rows, pages, seeds):
    """Over shared and copied pages, stops, limits, rows that are put out and temperatures from 0 to 1."""
    plain, drafting = engine(rows, 0, pages), engine(rows, DRAFTS, pages)
    for seed in range(seeds):
        asked = requests(seed, 8)
        assert drawn(drafting.generate(asked)) == drawn(plain.generate(asked))
    told = drafting.metrics()
    assert told["speculation/drafted"] > 5 * seeds and told["speculation/tokens"] >= 1
    assert not any(name.startswith("speculation/") for name in plain.metrics())
    assert drafting.metrics()["speculation/drafted"] == 0, "since it was last asked"


@pytest.mark.slow
def test_an_order_changes_no_completion():
    asked = requests(5, 8)
    fifo, longest = (engine(8, 0, order=how) for how in ("fifo", "longest"))
    assert drawn(longest.generate(asked)) == drawn(fifo.generate(asked))
    assert longest._flights._order.starts == fifo._flights._order.starts == 24


def chain(transitions: np.ndarray, guess: np.ndarray) -> EngineModel:
    """A model whose next word depends on the last, and a draft head that takes `guess` for the
    transitions."""
    hidden = lambda table: lambda tokens: jnp.log(jnp.asarray(table, jnp.float32))[tokens]
    right, wrong = hidden(transitions), hidden(guess)
    return EngineModel(
        manifest=(), assemble=dict, init_cache=lambda n: jnp.zeros((1, n, 512), jnp.uint32),
        prefill=lambda params, tokens, positions, segments, pages, cache: (right(tokens), cache),
        decode=lambda params, tokens, positions, table, cache: (right(tokens), cache),
        logits=lambda params, h: h, formats=EngineFormats(*["float32"] * 4), vocab_size=len(transitions),
        page=512,
        draft=lambda params, hidden, tokens: wrong(tokens))


def coupled(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The chance [...] that two words drawn from p and q [..., V] with the same Gumbel numbers are one: word
    i wins both races (Daliri, Musco and Suresh 2024, arXiv 2408.07978)."""
    ratio = np.maximum(p[..., None, :] / p[..., :, None], q[..., None, :] / q[..., :, None])
    return (1 / ratio.sum(-1)).sum(-1)


@pytest.mark.parametrize("length", [60, pytest.param(500, marks=pytest.mark.slow)])
def test_a_draft_heads_guess_is_taken_as_often_as_the_law_says_and_never_seen_in_the_tokens(length):
    """Of 2048 sequences: the tokens are those without drafts and, in the slow form a million of them, of the
    chain's distribution. Guesses, drawn with the numbers of the token in their place, are accepted with the
    chance of coupled draws; two drawn apart would agree less often."""
    rng = np.random.default_rng(3)
    p, q = (rng.dirichlet(np.ones(WORDS), WORDS) for _ in range(2))
    q = 0.7 * p + 0.3 * q
    asked, said = [GenRequest(str(i), (1,), SamplingParams(length), 512, i) for i in range(4)], {}
    for drafts in (0, 1):
        made = EmbeddedEngine(chain(p, q), max_model_len=512, max_num_seqs=4096, min_num_seqs=4096,
                              drafts=drafts)
        made.load({})
        made.commit(1, "")
        said[drafts] = np.array([c.token_ids for g in made.generate(asked) for c in g])
        told = made.metrics()
    np.testing.assert_array_equal(said[0], said[1])
    tokens = np.concatenate([np.ones((2048, 1), int), said[1]], 1)
    counts = np.zeros((WORDS, WORDS))
    np.add.at(counts, (tokens[:, :-1], tokens[:, 1:]), 1)
    expected = p * counts.sum(1, keepdims=True)
    assert counts.sum() == 2048 * length
    assert stats.chi2.sf(((counts - expected) ** 2 / expected).sum(), WORDS * (WORDS - 1)) > 1e-3
    amiss = q * counts.sum(1, keepdims=True)
    assert stats.chi2.sf(((counts - amiss) ** 2 / amiss).sum(), WORDS * (WORDS - 1)) < 1e-9
    share = counts.sum(1) / counts.sum()
    law, apart = share @ coupled(p, q), share @ (p * q).sum(1)
    assert apart + 0.1 < law < 1
    # what was taken did not depend on where it was: a draft follows each accepted one, too
    np.testing.assert_allclose(told["speculation/accepted"], law,
                               atol=5 / np.sqrt(told["speculation/drafted"]))
    assert told["speculation/tokens"] == 1 + told["speculation/accepted"]


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_a_head_that_knows_the_policy_is_always_right(temperature):
    """Even where it draws: it has the token's own random numbers."""
    p = np.random.default_rng(0).dirichlet(np.ones(WORDS), WORDS)
    made, plain = (engine(16, drafts, model=chain(p, p)) for drafts in (3, 0))
    asked = [GenRequest("r", (1,), SamplingParams(33, temperature), 4, 5)]
    assert drawn(made.generate(asked)) == drawn(plain.generate(asked))
    assert made.metrics() == {"speculation/drafted": 4 * 16, "speculation/accepted": 1.0,
                              "speculation/tokens": 2.0}


def test_a_model_that_repeats_itself_takes_fewer_steps():
    """Its next word is likely the one after the last. Steps are counted by the model."""
    steps = []

    def chained(tokens):
        jax.debug.callback(lambda: steps.append(1))
        return 6.0 * jax.nn.one_hot((tokens + 1) % 4, 8)

    model = EngineModel(
        manifest=(), assemble=dict, init_cache=lambda n: jnp.zeros((1, n, 16), jnp.uint32),
        prefill=lambda params, tokens, positions, segments, pages, cache: (chained(tokens), cache),
        decode=lambda params, tokens, positions, table, cache: (chained(tokens), cache),
        logits=lambda params, h: h, formats=EngineFormats(*["float32"] * 4), vocab_size=8, page=16)
    asked = [GenRequest("r", (1,), SamplingParams(36), 2, 5)]
    taken, said = {}, {}
    for drafts in (0, 4):
        made = engine(8, drafts, model=model)
        steps.clear()
        said[drafts] = drawn(made.generate(asked))
        jax.effects_barrier()
        taken[drafts] = len(steps)
        told = made.metrics()
    assert said[0] == said[4] and taken[4] < taken[0] * 2 / 3
    assert told["speculation/accepted"] > 0.5 and told["speculation/tokens"] > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp8_unified"])
def test_a_transformer_draws_the_same_tokens_and_log_probabilities_in_bits(precision):
    """Greedy and sampled: the program decodes as many rows either way. The head is one that has learned
    nothing."""
    said, told = {}, {}
    for how in ("off", "suffix", "head"):
        ctx = build_run(load_config("demo", ["--run.dir", "unused", "--precision.recipe", precision,
                                             "--sft.steps", "0",
                                             "--rollout.max_new_tokens", "24", "--train.row_tokens", "64",
                                             *(["--rollout.kv_cache", "auto"] if precision == "bf16" else []),
                                             "--rollout.speculation", how, "--rollout.min_num_seqs", "16"]))
        publishing.publish(ctx, ctx.policy(ctx.initial_params()), 1, draft=ctx.fresh_draft())
        asked = [GenRequest(f"{t}{i}", p.token_ids, SamplingParams(24, t), 2, i) for t in (0.0, 1.0)
                 for i, p in enumerate(ctx.train[:2])]
        said[how] = drawn(ctx.engine.generate(asked))
        told[how] = ctx.engine.metrics().get("speculation/drafted", 0)
        ctx.close()
    assert said["off"] == said["suffix"] == said["head"] and told["off"] == 0 < min(told["suffix"],
                                                                                    told["head"])
