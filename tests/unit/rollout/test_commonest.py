"""The share of held-out completions that are one and the same."""

from __future__ import annotations

import numpy as np
import pytest

from bridges.api import Completion
from jaxfp8rl.rollout.scored_groups import commonest_share


def said(*tokens: int) -> Completion:
    n = len(tokens)
    return Completion("r", 0, np.array(tokens, np.int32), np.zeros(n, np.float32), "stop", ())


@pytest.mark.parametrize(("completions", "share"), [
    ([], 0.0), ([(5, 1)], 1.0), ([(5, 1), (5,), (5, 1), (1, 5)], 0.5), ([(5, 1)] * 9 + [(6, 1)], 0.9),
    ([(1,), (2,), (3,), (4,)], 0.25),
])
def test_completions_are_the_same_if_all_their_tokens_are(completions, share):
    assert commonest_share([(None, (said(*tokens),)) for tokens in completions]) == share
