"""The start-up gate: what it measures, what it refuses, what it shows."""

import numpy as np
import pytest

from jaxfp8rl.config.schema import Gate
from jaxfp8rl.data.packing import Sample, pack
from jaxfp8rl.data.tokenizer import load_tokenizer
from jaxfp8rl.errors import GateFailed
from jaxfp8rl.training.gate import check_gate

TOKENIZER = load_tokenizer("chars:0123456789+-*=")
GATE = Gate(max_mean_gap=0.05, max_gap=0.5)


def batch():
    """Two completions packed into one row, log-probabilities -1, -2, ..."""
    texts = (("1+2=", "3"), ("4+5=", "12"))
    return pack([Sample(TOKENIZER.encode(p), TOKENIZER.encode(c), -np.arange(1.0, len(c) + 1), 0.0)
                 for p, c in texts], 16, 1, 2)


def learner(gap: float, at: int = 1) -> np.ndarray:
    """The engine's values with `gap` at one live token, and anything at all under the mask."""
    b = batch()
    values = np.where(b.response_mask, b.rollout_logp, np.nan)
    values[tuple(np.argwhere(b.response_mask)[at])] += gap
    return values


def test_agreement_passes_and_is_reported():
    assert check_gate(GATE, batch(), learner(0.0), TOKENIZER) == {"gate/mean_gap": 0.0, "gate/max_gap": 0.0}
    assert check_gate(GATE, batch(), learner(0.12),
                      TOKENIZER) == pytest.approx({"gate/mean_gap": 0.04, "gate/max_gap": 0.12})


@pytest.mark.parametrize("gap", [0.2, -0.2, 0.6, np.nan, np.inf])
def test_a_gap_past_either_limit_or_not_finite_stops(gap):
    with pytest.raises(GateFailed) as e:
        check_gate(GATE, batch(), learner(gap), TOKENIZER)
    assert e.value.exit_code == 3 and "next step:" in str(e.value)


def test_the_worst_token_is_shown_in_the_context_of_its_own_sequence():
    """Row order is longest first: the live tokens are "1", "2" after "4+5=", then "3" after "1+2="."""
    with pytest.raises(GateFailed) as e:
        check_gate(GATE, batch(), learner(-0.75, at=1), TOKENIZER)
    assert "worst token: '2'" in str(e.value) and "after '4+5=1'" in str(e.value)
    assert "learner -2.7500, engine -2.0000" in str(e.value)
    with pytest.raises(GateFailed, match=r"'3' \(id \d+\) after '1\+2='"):
        check_gate(GATE, batch(), learner(3.0, at=2), TOKENIZER)


def test_a_large_mean_of_small_gaps_stops_too():
    b = batch()
    with pytest.raises(GateFailed, match="mean gap 0.1 nats"):
        check_gate(GATE, b, b.rollout_logp + np.float32(0.1), TOKENIZER)
