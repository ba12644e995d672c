"""The embedded engine's continuous batching: what a sequence draws does not depend on its neighbours, on the
number of rows and pages, or on how often it was put out; pages are given back; nothing is compiled twice."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bridges.api import EngineFormats, GenRequest, SamplingParams
from bridges.engines import batch
from bridges.engines.embedded_engine import EmbeddedEngine, EngineModel
from bridges.engines.flights import Flights, row_width

WORDS, PAGE, MAX_LEN = 16, 4, 40
pytestmark = pytest.mark.usefixtures("quick_compile")


def _hashed(x):
    """Some mixing of non-negative integers."""
    return (x.astype(jnp.uint32) * jnp.uint32(2654435761)) >> 7


def recorder(words: int = WORDS) -> EngineModel:
    """A model that remembers every token: its state after a prefix is a sum, over the slots that it sees, of
    a hash of (token, position), read from the pages. A slot that is lost, shared wrongly or overwritten
    changes all that follows."""

    def entry(tokens, positions):
        return _hashed(tokens * 64 + positions + 1)

    def hidden(total):
        bits = _hashed(total[..., None] + jnp.arange(words, dtype=jnp.uint32) * 977)
        return (bits % 1000).astype(jnp.float32) / 250

    def prefill(params, tokens, positions, segments, pages, cache):
        new = entry(tokens, positions)
        same = (segments[:, :, None] == segments[:, None, :]) & (segments[:, None, :] > 0)
        seen = same & (positions[:, None, :] <= positions[:, :, None])
        return hidden((new[:, None, :] * seen).sum(-1, dtype=jnp.uint32)), cache.at[0, pages,
                                                                                    positions % PAGE].set(
            new, mode="drop")

    def decode(params, tokens, positions, table, cache):
        page = jnp.take_along_axis(table, (positions // PAGE)[:, None], 1)[:, 0]
        cache = cache.at[0, page, positions % PAGE].set(entry(tokens, positions), mode="drop")
        all_slots = cache.at[0, table].get(mode="clip").reshape(len(tokens), -1)
        seen = jnp.arange(all_slots.shape[1]) <= positions[:, None]
        return hidden((all_slots * seen).sum(-1, dtype=jnp.uint32)), cache

    return EngineModel(
        manifest=(), assemble=dict, init_cache=lambda n: jnp.zeros((1, n, PAGE), jnp.uint32), prefill=prefill,
        decode=decode, logits=lambda params, h: h, formats=EngineFormats(*["float32"] * 4), vocab_size=words,
        page=PAGE)


MODEL = recorder()


@functools.cache
def engine(rows: int, pages: int | None = None) -> EmbeddedEngine:
    """Tests share engines, and with them what is compiled."""
    made = EmbeddedEngine(MODEL, max_model_len=MAX_LEN, max_num_seqs=rows, pages=pages)
    made.load({})
    made.commit(1, "")
    return made


def requests(seed: int, count: int) -> list[GenRequest]:
    rng = np.random.default_rng(seed)
    made = []
    for i in range(count):
        prompt = tuple(rng.integers(0, WORDS, rng.integers(1, 16)).tolist())
        how = SamplingParams(int(rng.integers(1, MAX_LEN - len(prompt))), float(rng.choice([0, 0.7, 1.0])),
                             stop_token_ids=tuple(rng.integers(0, WORDS, rng.integers(0, 2)).tolist()))
        made.append(GenRequest(f"r{i}", prompt, how, 3, int(rng.integers(2**32))))
    return made


def drawn(groups) -> list:
    return [(c.request_id, c.index, c.token_ids.tolist(), c.logprobs.tolist(), c.finish_reason)
            for group in groups for c in group]


@jax.jit
def _draw_alone(tokens, length, seed, index, t, temperature):
    """The next token after `length` tokens, without pages and neighbours, and its log-probability; greedy at
    0."""
    at = jnp.arange(len(tokens))
    total = jnp.where(at < length, _hashed(tokens * 64 + at + 1), 0).sum(dtype=jnp.uint32)
    logits = (_hashed(total + jnp.arange(WORDS, dtype=jnp.uint32) * 977) % 1000).astype(jnp.float32) / 250
    logits /= jnp.where(temperature > 0, temperature, 1)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), index), t)
    token = jnp.where(temperature > 0, jax.random.categorical(key, logits), jnp.argmax(logits))
    return token, jax.nn.log_softmax(logits)[token]


def alone(r: GenRequest, index: int) -> tuple[list[int], list[float], str]:
    """What completion `index` of `r` draws."""
    tokens, logps, s, P = np.zeros(MAX_LEN, np.int32), [], r.sampling, len(r.prompt_token_ids)
    tokens[:P] = r.prompt_token_ids
    for t in range(s.max_tokens):
        token, logp = _draw_alone(tokens, P + t, np.uint32(r.seed), np.uint32(index), t,
                                  np.float32(s.temperature))
        tokens[P + t] = token
        logps.append(float(logp))
        if token in s.stop_token_ids:
            return tokens[P : P + t + 1].tolist(), logps, "stop"
    return tokens[P : P + s.max_tokens].tolist(), logps, "length"


ROOMY = engine(24)
TIGHT = [engine(8), engine(8, 11), engine(16, 24)]  # a sequence of 40 tokens takes 11 pages


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([1, 3, 8]))
def test_neither_rows_nor_pages_change_what_is_drawn(seed, count):
    asked = requests(seed, count)
    want = drawn(ROOMY.generate(asked))
    for tight in TIGHT:
        assert drawn(tight.generate(asked)) == want


def test_a_small_cache_does_not_change_what_is_drawn():
    asked = requests(11, 8)
    assert drawn(TIGHT[1].generate(asked)) == drawn(ROOMY.generate(asked))


def test_rows_are_put_out_and_pages_are_given_back(monkeypatch):
    tight, put_out, last = TIGHT[1], [], []
    collect = Flights._collect

    def seen(self, status):
        put_out.append(int((status == batch.PUT_OUT).sum()))
        collect(self, status)
        if not self._numbered:
            last.append(self._left)

    monkeypatch.setattr(Flights, "_collect", seen)
    tight.generate(requests(3, 8))
    assert sum(put_out) > 0 and last and set(last) == {11} and not tight._flights


def test_prompts_of_a_group_are_computed_once(monkeypatch):
    tokens = []
    packed = Flights._packed
    monkeypatch.setattr(Flights, "_packed", lambda self, prompts: (
        tokens.append(sum(len(p.tokens) for p in prompts)), packed(self, prompts))[1])
    asked = [GenRequest(f"r{i}", tuple(range(10)), SamplingParams(4), 6, i) for i in range(4)]
    engine(8).generate(asked)
    assert sum(tokens) == 40


def test_prompts_that_wait_at_a_publish_are_computed_again_once_a_group():
    e = engine(8)
    e.submit([GenRequest(f"r{i}", tuple(range(10)), SamplingParams(8), 6, i) for i in range(4)])
    e.poll()
    assert len(e._flights._waiting) > 1
    e.commit(e.weight_version() + 1, "")
    assert len(e._flights._pending) <= 4 and sum(len(p.flights) for p in e._flights._pending) == 16
    while e.partial():
        e.poll()


def test_finished_groups_are_told_while_others_are_in_flight():
    e = engine(8)
    e.submit([GenRequest("short", (1, 2), SamplingParams(2), 2, 1),
              GenRequest("long", (1, 2), SamplingParams(30), 2, 1)])
    assert [g[0].request_id for g in e.poll()] == ["short"]
    assert list(e.partial()) == ["long"]
    while not (done := e.poll()):
        pass
    whole = engine(8).generate([GenRequest("long", (1, 2), SamplingParams(30), 2, 1)])
    assert drawn(done) == drawn(whole)


@pytest.mark.parametrize("keep", [True, False])
def test_interrupted_sequences_go_on_where_they_were(keep):
    """The weights are the same, so the tokens are, too; versions tell of the publish."""
    asked = [dataclasses.replace(r,
                                 sampling=dataclasses.replace(r.sampling, max_tokens=20, stop_token_ids=()))
             for r in requests(5, 8)]
    e, groups = engine(8), {}
    e.submit(asked)
    version = e.weight_version()
    while len(groups) < len(asked):
        for group in e.poll():
            groups[group[0].request_id] = group
        e.pause(keep)
        version += 1
        e.commit(version, "")
        e.resume()
    got = [groups[r.request_id] for r in asked]
    assert drawn(got) == drawn(engine(8).generate(asked))
    spans = [c.version_spans for group in got for c in group]
    assert all(s[0].start == 0 and s[-1].stop == 20 and len(s) > 3 for s in spans)
    assert all(a.stop == b.start and a.version < b.version for s in spans for a, b in zip(s, s[1:]))


def test_cancelled_sequences_leave_no_trace():
    asked, groups = requests(7, 8), {}
    e = engine(8, 11)
    e.submit(asked)
    for r in asked[::2]:
        groups |= {g[0].request_id: g for g in e.poll()}
        e.cancel([r.request_id])
    while e.partial():
        groups |= {g[0].request_id: g for g in e.poll()}
    for r in asked[1::2]:
        told = [(c.token_ids.tolist(), c.finish_reason) for c in groups[r.request_id]]
        assert told == [alone(r, i)[::2] for i in range(r.n)]
    assert not e._flights


def test_a_cache_too_small_for_a_sequence_is_refused():
    with pytest.raises(ValueError, match="10 pages: a sequence of 40 tokens takes 11"):
        engine(8, 10)


def test_a_long_run_compiles_nothing_new():
    e = engine(8)
    asked = [GenRequest(f"r{i}", tuple(range(9)), SamplingParams(12), 4, i) for i in range(6)]
    e.generate(asked)
    before = e._flights.programs()
    for seed in range(3):
        e.generate([dataclasses.replace(r, seed=seed) for r in asked])
    assert e._flights.programs() == before


def test_prompts_of_any_length_and_number_take_few_programs():
    model = recorder()
    e = EmbeddedEngine(model, max_model_len=200, max_num_seqs=8, min_num_seqs=64)
    e.load({})
    e.commit(1, "")
    rng = np.random.default_rng(0)
    longest, shapes = [], set()
    for _ in range(40):
        lengths = rng.integers(1, rng.integers(2, 190), rng.integers(1, 64))
        e.generate([GenRequest(str(i), tuple(rng.integers(0, WORDS, n).tolist()), SamplingParams(2), 1, i)
                    for i, n in enumerate(lengths)])
        longest.append(max(lengths))
        shapes.add(row_width(max(lengths)))
    assert shapes == {16, 64, 256} and len(set(longest)) > 25
    assert e._flights._advance._cache_size() == 1
    # rows of each width: 1, 2, 4 and so on, until the tokens that enter at once fill them
    assert e._flights._enter._cache_size() <= 1 + 6 + 6


@given(st.integers(1, 20000))
def test_a_row_is_wide_enough_and_a_long_prompt_leaves_a_third_of_it_empty_at_most(n):
    width = row_width(n)
    assert n <= width and (width <= 1024 or width <= 1.5 * n)
    assert row_width(width) == width
