"""rollout.one_copy on a GPU: every bit as with two copies, and the codes' bytes saved. CUDA graphs: test_vllm_inplace.py."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.one_copy import two_updates

SMALL = [w for k, v in {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 6}.items()
         for w in (f"--model.config.{k}", str(v))] + ["--rollout.enforce_eager", "true"]  # fmt: skip


def test_every_bit_is_as_with_two_copies_and_their_bytes_are_saved():
    one, two = two_updates(True, SMALL), two_updates(False, SMALL)
    assert one["digests"] == two["digests"] and len(set(one["digests"])) > 10
    saved = two["in_use"] - one["in_use"]
    print(one, two)
    assert saved == pytest.approx(one["codes"], rel=0.02)
