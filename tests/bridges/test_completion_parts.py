"""Completions that go on: their spans of versions, and a completion joined from its parts."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridges.api import Completion, joined, spans


def whole(versions: list[int], supported: bool) -> Completion:
    rng, n = np.random.default_rng(len(versions)), len(versions)
    sizes = rng.integers(1, 4, n).astype(np.int32) if supported else None
    ids = rng.integers(0, 9, sizes.sum()).astype(np.int32) if sizes is not None else None
    return Completion("r", 0, rng.integers(0, 9, n).astype(np.int32), -rng.random(n).astype(np.float32),
                      "stop",
                      spans(versions), None, ids, sizes)


versions = st.lists(st.integers(0, 3), min_size=1, max_size=12).map(sorted)


@given(versions)
def test_spans_say_the_version_of_each_token_and_are_as_few_as_can_be(versions):
    found = spans(versions)
    assert [s.version for s in found for _ in range(s.start, s.stop)] == versions
    assert [s.version for s in found] == sorted(set(versions)) and spans([]) == ()


@given(versions, st.integers(0, 12), st.booleans())
def test_a_completion_is_joined_from_its_parts(versions, at, supported):
    at = min(at, len(versions) - 1)
    want = whole(versions, supported)
    first = dataclasses.replace(want.first(at, 3), finish_reason="abort")
    rest = dataclasses.replace(
        want, token_ids=want.token_ids[at:], logprobs=want.logprobs[at:], version_spans=spans(versions[at:]),
        support_ids=want.support_ids[want.support_sizes[:at].sum():] if supported else None,
        support_sizes=want.support_sizes[at:] if supported else None)
    got = joined(first, rest)
    for field in dataclasses.fields(Completion):
        np.testing.assert_array_equal(getattr(got, field.name), getattr(want, field.name), err_msg=field.name)


def test_parts_that_cannot_be_joined_are_refused():
    some = whole([0, 1], False)
    with pytest.raises(ValueError, match="only a part of it has supports"):
        joined(some, whole([0, 1], True))
    with pytest.raises(ValueError, match="routed_experts cannot be joined"):
        joined(dataclasses.replace(some, routed_experts=np.zeros((3, 1, 1), np.uint8)), some)
