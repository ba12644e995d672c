"""rollout.one_copy on a GPU: scores as with two copies, and the codes' bytes saved. CUDA graphs:
test_vllm_inplace.py."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.one_copy import in_child

SMALL = [w for k, v in {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6}.items()
         for w in (f"--model.config.{k}", str(v))]


def test_scores_are_as_by_codes_of_its_own_and_their_bytes_are_saved():
    """Two updates in two builds differ by the order of sums in scattered gradients; at equal weights nothing
    may differ."""
    one, two = in_child(True, SMALL), in_child(False, SMALL)
    assert one["as_own"] and one["digests"]["scores"][0] == two["digests"]["scores"][0]
    assert len(set(one["digests"]["scores"])) == 3
    saved = two["in_use"] - one["in_use"]
    assert saved == pytest.approx(one["codes"], rel=0.02)
