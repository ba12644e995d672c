"""Calibrated scales of FP8 attention in vLLM, compiled and under CUDA graphs, where scale 1 cuts keys off."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.kv_scales_vllm import NORMS, measure


@pytest.mark.parametrize("norm", NORMS)
def test_calibrated_scales_keep_the_policy_and_learner_and_engine_share_them(norm):
    found = measure(norm, "FP8", 512)
    print(found)
    calibrated, one = found["calibrated, in place"], found["scale 1, in place"]
    assert found["calibrated, reload"] == calibrated, "the two transports leave different engines behind"
    assert calibrated["BF16 attention"]["k3"] < one["BF16 attention"]["k3"] / 3
    assert calibrated["mirrored"]["k3"] < calibrated["BF16 attention"]["k3"] / 2
