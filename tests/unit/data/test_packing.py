"""Packing: nothing is lost, nothing overlaps, and the static bound always holds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.data.packing import Sample, assign_rows, microbatches_needed, pack

lengths = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 10)), min_size=1, max_size=40)


def samples_of(lengths: list[tuple[int, int]]) -> list[Sample]:
    rng = np.random.default_rng(0)
    return [
        Sample(rng.integers(1, 99, p), rng.integers(1, 99, c), -rng.random(c).astype(np.float32),
           float(rng.normal()))
        for p, c in lengths
    ]


@given(lengths, st.integers(1, 4), st.integers(16, 40))
def test_every_sample_comes_back_whole(lengths, rows, row_tokens):
    samples = samples_of(lengths)
    m = microbatches_needed(len(samples), 16, row_tokens, rows)
    batch = pack(samples, row_tokens, rows, m)
    assert batch.tokens.shape == (m, rows, row_tokens)
    flat = [x.reshape(-1, row_tokens) for x in batch if x is not None]
    found = []
    for tokens, positions, segments, mask, logp, advantages in zip(*flat):
        for s in range(1, segments.max() + 1):
            at = np.flatnonzero(segments == s)
            np.testing.assert_array_equal(positions[at], np.arange(len(at)))
            live = at[mask[at]]
            assert (np.diff(at) == 1).all() and len(set(advantages[live])) == 1 and (
                advantages[at[~mask[at]]] == 0).all()
            found.append((tuple(tokens[at]), tuple(tokens[live]), tuple(logp[live]), advantages[live][0]))
        assert not mask[segments == 0].any() and (tokens[segments == 0] == 0).all()
    want = [((*s.prompt, *s.completion), tuple(s.completion), tuple(s.logprobs), np.float32(s.advantage))
            for s in samples]
    assert sorted(found) == sorted(want)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=60), st.integers(16, 64), st.integers(1, 5))
def test_the_static_number_of_microbatches_is_always_enough(lengths, row_tokens, rows):
    used = len(assign_rows(lengths, row_tokens))
    assert used <= microbatches_needed(len(lengths), 16, row_tokens, rows) * rows


def test_a_sequence_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="17 tokens, a row holds 16"):
        assign_rows([3, 17], 16)


@given(lengths, st.integers(4, 6))
def test_the_support_of_each_token_lies_beside_it_and_one_that_is_not_known_is_not_learned_from(
        lengths, width):
    rng, samples = np.random.default_rng(1), []
    for s in samples_of(lengths):
        known = [set(rng.choice(99, rng.integers(0, 4), replace=False)) for _ in s.completion]
        told = [{int(t), *own} if own else set() for t, own in zip(s.completion, known)]
        ids = np.array([i for own in told for i in own], np.int32)
        samples.append(s._replace(support=(ids, np.array([len(own) for own in told], np.int32))))
    shape = 32, 2, microbatches_needed(len(samples), 16, 32, 2)
    batch, plain = pack(samples, *shape, support=width), pack(samples, *shape)
    assert plain.support is None and (batch.tokens == plain.tokens).all() and batch.support.shape == (
        *plain.tokens.shape, width)
    sizes = (batch.support >= 0).sum(-1)
    np.testing.assert_array_equal(batch.response_mask, plain.response_mask & (sizes > 0))
    assert (batch.support == batch.tokens[..., None]).any(-1)[batch.response_mask].all()
    told = [tuple(sorted(row[row >= 0])) for row in batch.support[batch.response_mask]]
    ends = [np.split(ids, np.cumsum(of)[:-1]) for ids, of in (s.support for s in samples)]
    assert sorted(told) == sorted(tuple(sorted(own)) for s in ends for own in s if len(own))
    # an update without samples has the same shape
    assert pack([], *shape, support=width).support.shape == batch.support.shape
    # the gate's draws are not filtered
    assert pack([*samples_of([(1, 1)])], *shape, support=width).support is None
