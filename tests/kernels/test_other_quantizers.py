"""Where other frameworks' formulas for the same quantisation differ from the engine's, counted on data.

Each formula is written out in numpy on groups of elements that share a scale. The figures are those of the
table in the documentation of the precision recipes.
"""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.numerics import ulp_distance
from pallas_kernels.quantize import reference as q

E4M3 = ml_dtypes.float8_e4m3fn
f32 = np.float32
MAX = f32(448)


def cast(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -MAX, MAX).astype(E4M3)


def divided(x, scale):
    return cast(x / scale), scale


def multiplied(x, scale):
    return cast(x * (f32(1) / scale)), scale


def floored(amax, floor):
    return np.maximum(amax, f32(floor))


def nemo(x, amax):
    with np.errstate(divide="ignore"):
        inverse = np.where(amax == 0, f32(1), MAX / amax)
    return cast(x * inverse), f32(1) / inverse


def ue8m0(scale):
    return np.exp2(np.ceil(np.log2(scale)))


# name -> (x [G, C], amax [G, 1]) -> codes, scale
FORMULAS = {
    "vllm per_token_group_fp8_quant": lambda x, a: divided(x, floored(a, 1e-10) / MAX),
    "vllm fused with RMSNorm or SiLU, and in torch": lambda x, a: divided(
        x, np.maximum(a / MAX, f32(1 / (448 * 512)))),
    "vllm Triton": lambda x, a: divided(x, floored(a, 1e-10) * f32(1 / 448)),
    "DeepGEMM and vllm online weights, on a CPU": lambda x, a: multiplied(x, floored(a, 1e-4) / MAX),
    "DeepGEMM and vllm online weights, on a GPU": lambda x, a: multiplied(x, floored(a, 1e-4) * f32(1 / 448)),
    "NeMo RL": nemo,
    "verl": lambda x, a: multiplied(x, floored(a, 1e-10) / MAX),
}
POWERS_OF_TWO = {
    "vllm UE8M0": lambda x, a: divided(x, ue8m0(np.maximum(floored(a, 1e-10) / MAX, f32(1e-10)))),
    "DeepGEMM UE8M0": lambda x, a: multiplied(x, ue8m0(floored(a, 1e-4) / MAX)),
}


def weights() -> np.ndarray:
    """[G, 128 * 128]: BF16 weights of standard deviation 0.02, as the blocks see them."""
    return (0.02
            * np.random.default_rng(0).normal(size=(32, 128 * 128))).astype(ml_dtypes.bfloat16).astype(f32)


def activations() -> np.ndarray:
    """[G, 128]: BF16 groups of amax 2^-6 to 2^6."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4096, 128)) * np.exp2(rng.uniform(-6, 6, (4096, 1)))
    return x.astype(ml_dtypes.bfloat16).astype(f32)


def faint() -> np.ndarray:
    """[G, 128]: BF16 groups of amax 1e-12 to 1e-2, an eighth of them zero."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(4096, 128)) * 10.0 ** rng.uniform(-12, -2,
                                                           (4096, 1)) * (np.arange(4096)[:, None] % 8 > 0)
    return x.astype(ml_dtypes.bfloat16).astype(f32)


DATA = {"weights": weights(), "activations": activations(), "faint": faint()}


@functools.cache
def reference(data: str, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    x = DATA[data]
    if data == "weights":
        codes, scale = q.quantize_blocks(x.reshape(-1, 128, 128), power_of_two=power_of_two)
    else:
        codes, scale = q.quantize_rows(x, power_of_two=power_of_two)
    return np.asarray(codes).reshape(x.shape), np.asarray(scale).reshape(-1, 1)


def differences(name: str, data: str) -> tuple[float, float, int]:
    """Fractions of scales and of codes unlike the reference's; how many codes apart the furthest are."""
    x = DATA[data]
    codes, scale = (FORMULAS | POWERS_OF_TWO)[name](x, np.abs(x).max(1, keepdims=True))
    want_codes, want_scale = reference(data, name in POWERS_OF_TWO)
    apart = ulp_distance(codes, want_codes)
    return float((scale != want_scale).mean()), float((apart > 0).mean()), int(apart.max())


EXPECTED = {  # scales and codes that differ, in percent: weights, activations, faint
    "vllm per_token_group_fp8_quant": ((0.00, 0.000), (0.00, 0.000), (0.00, 0.000)),
    "vllm fused with RMSNorm or SiLU, and in torch": ((0.00, 0.000), (0.00, 0.000), (89.60, 76.921)),
    "vllm Triton": ((56.25, 0.148), (55.98, 0.076), (66.11, 0.059)),
    "DeepGEMM and vllm online weights, on a CPU": ((0.00, 0.018), (0.00, 0.045), (77.61, 64.958)),
    "DeepGEMM and vllm online weights, on a GPU": ((56.25, 0.148), (55.98, 0.076), (90.04, 64.959)),
    "NeMo RL": ((37.50, 0.000), (30.44, 0.029), (48.85, 12.303)),
    "verl": ((0.00, 0.018), (0.00, 0.045), (0.00, 0.041)),
    "vllm UE8M0": ((0.00, 0.000), (0.00, 0.000), (46.29, 33.788)),
    "DeepGEMM UE8M0": ((0.00, 0.000), (0.00, 0.000), (75.07, 62.572)),
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("name", [*FORMULAS, *POWERS_OF_TWO])
def test_how_often_codes_and_scales_differ(name, data):
    scales, codes, apart = differences(name, data)
    assert (100 * scales, 100 * codes) == pytest.approx(EXPECTED[name][list(DATA).index(data)], abs=0.005,
                                                        rel=0.05)
    if data != "faint":
        assert apart <= 1
