"""Rows that hold a shared prefix once: what each token sees is its own sequence, and the static bound
holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxfp8rl.data import trees
from jaxfp8rl.data.packing import Sample, microbatches_needed, pack, unpack

LONGEST = 16
sequences = st.lists(st.tuples(st.lists(st.integers(1, 2), min_size=1, max_size=9), st.integers(1, 7)),
                     min_size=1,
                     max_size=20)


def samples_of(parts) -> list[Sample]:
    """Prompts of few different tokens, so that many begin alike; completions of one turn or of two."""
    rng, found = np.random.default_rng(0), []
    for i, (prompt, n) in enumerate(parts):
        sampled = None if n < 4 else np.arange(n) != 2
        found.append(Sample(prompt, rng.integers(1, 3, n), -rng.random(n).astype(np.float32),
                            float(rng.normal()),
                            sampled=sampled, weights=np.full(n, i, np.float32)))
    return found


def seen(ends: np.ndarray) -> np.ndarray:
    """[T, T] bool: whether a token of a row sees another, by the definition."""
    at = np.arange(len(ends))
    return (at[:, None] >= at) & (at[:, None] < ends)


@given(sequences, st.integers(1, 5), st.integers(LONGEST, 50), st.integers(1, 3))
def test_a_token_sees_its_own_sequence_and_nothing_else(parts, share, row_tokens, rows):
    samples = samples_of(parts)
    batch = pack(samples, row_tokens, rows, microbatches_needed(len(samples), LONGEST, row_tokens, rows),
                 share=share)
    found = []
    for tokens, positions, segments, mask, logp, weights, ends in zip(*(
            x.reshape(-1, row_tokens) for x in (*batch[:5], batch.loss_weights, batch.ends))):
        assert (ends[segments == 0] == 0).all()
        for s in range(1, segments.max() + 1):
            own = np.flatnonzero(segments == s)
            path = np.flatnonzero(seen(ends)[own[-1]])  # of its last token
            np.testing.assert_array_equal(positions[path], np.arange(len(path)))
            for at in own:  # and of each of its tokens, as far as that has come
                np.testing.assert_array_equal(np.flatnonzero(seen(ends)[at]), path[path <= at])
            live = own[mask[own]]
            assert (segments[live - 1] == s).all(), "a learned token follows its own sequence's token"
            found.append((tuple(tokens[path]), tuple(tokens[live]), tuple(logp[live]), weights[live][0]))
    drawn = [np.ones(len(s.completion), bool) if s.sampled is None else s.sampled for s in samples]
    want = [((*s.prompt, *s.completion), tuple(s.completion[d]), tuple(s.logprobs[d]), s.weights[0])
            for s, d in zip(samples, drawn)]
    assert sorted(found) == sorted(want)
    for values, s in zip(unpack(batch.rollout_logp, samples, share), samples):
        np.testing.assert_array_equal(values, s.logprobs)


@given(sequences, st.integers(LONGEST, 50))
def test_where_nothing_is_alike_rows_are_the_plain_ones(parts, row_tokens):
    samples = [s._replace(prompt=(50 + i, *s.prompt)) for i, s in enumerate(samples_of(parts))]
    shape = row_tokens, 1, microbatches_needed(len(samples), LONGEST + 1, row_tokens + 1, 1)
    tree, plain = pack(samples, row_tokens + 1, *shape[1:],
                       share=1), pack(samples, row_tokens + 1, *shape[1:])
    for name, x in plain._asdict().items():
        if x is not None:
            np.testing.assert_array_equal(getattr(tree, name), x, err_msg=name)
    same = plain.segment_ids[..., :, None] == plain.segment_ids[..., None, :]
    ends = np.where(plain.segment_ids > 0, np.where(same, np.arange(1, row_tokens + 2), 0).max(-1), 0)
    np.testing.assert_array_equal(tree.ends, ends)
    assert plain.ends is None


def test_a_group_lies_behind_its_prompt():
    prompt = (7, 8, 9, 5)
    group = [Sample(prompt, np.array([i, 1]), np.zeros(2), 1.0) for i in range(3)]
    batch = pack([*group, Sample((7, 3), np.array([1]), np.zeros(1), 1.0)], 16, 1, 1, share=2)
    assert batch.tokens[0, 0].tolist() == [7, 8, 9, 5, 0, 1, 5, 1, 1, 5, 2, 1, 7, 3, 1, 0]
    assert batch.positions[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5, 0, 1, 2, 0]
    assert batch.ends[0, 0].tolist() == [12, 12, 12, 6, 6, 6, 9, 9, 9, 12, 12, 12, 15, 15, 15, 0]
    assert pack([], 16, 1, 1, share=2).ends.shape == (1, 1, 16)


def test_what_two_learn_from_is_not_shared_and_a_later_turn_shares_the_earlier_one():
    first = Sample((1, 2, 3), np.array([4, 5, 6]), np.zeros(3), 1.0)
    twin = first._replace(advantage=-1.0)
    # of a rewritten history: 4 and 5 are its prompt
    later = Sample((1, 2, 3, 4, 5, 9), np.array([7]), np.zeros(1), 1.0)
    batch = pack([first, twin, later], 20, 1, 1, share=1)
    assert batch.tokens[0, 0, :11].tolist() == [1, 2, 3, 4, 5, 9, 7, 3, 4, 5, 6]
    assert batch.response_mask.sum() == 7


def test_a_sequence_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="sequence 1 has 17 tokens, a row holds 16"):
        trees.arrange([np.ones(3, np.int32), np.ones(17, np.int32)], [1, 1], 16, 1)
