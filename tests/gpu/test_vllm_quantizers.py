"""The learner's quantiser and product on the GPU against the kernels that vLLM runs there, each comparison by
itself.

Activations go through `per_token_group_fp8_quant`, its fused forms with RMSNorm and SiLU where the engine
compiles, and CUTLASS's blockwise product. Everything is compared with what the learner computes under jax.jit
on the same GPU.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hard_cases import hard_cases

from jaxfp8rl.precision.jit import rounding_exact_jit
from pallas_kernels.blockwise_matmul import reference as matmul
from pallas_kernels.blockwise_matmul import xla
from pallas_kernels.numerics import relative_l2, tile_distinct, ulp_distance
from pallas_kernels.quantize import reference as q

E4M3 = ml_dtypes.float8_e4m3fn
SHAPE = (2688, 4096)  # 1.1e7 elements, whole blocks
quantize_rows = jax.jit(q.quantize_rows, static_argnames=("dtype", "power_of_two", "amax_floor"))
quantize_blocks = jax.jit(q.quantize_blocks)


@pytest.fixture(scope="module")
def torch():
    pytest.importorskip("vllm", reason="vLLM is not installed")
    import torch
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C

    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    return torch


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def x(request) -> np.ndarray:
    return hard_cases(SHAPE).astype(jnp.dtype(request.param))


def normal(shape, seed: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).normal(size=shape)).astype(ml_dtypes.bfloat16)


def cuda(torch, a: np.ndarray):
    """A copy on the GPU, of the same float type."""
    a = np.ascontiguousarray(a)
    return torch.from_numpy(a.view(f"i{a.itemsize}").copy()).cuda().view(getattr(torch, a.dtype.name))


def host(tensor, dtype) -> np.ndarray:
    import torch

    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return tensor.contiguous().view(integer).cpu().numpy().view(dtype)


def group_quant(torch, x: np.ndarray, ue8m0: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """vLLM's CUDA kernel, called as its block-FP8 linears do: scales column by column."""
    rows, columns = x.shape
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty((columns // 128, rows), device="cuda").T
    kernel = torch.ops._C.per_token_group_fp8_quant
    kernel(cuda(torch, x), codes, scale, 128, 1e-10, -448.0, 448.0, ue8m0, True, False)
    return host(codes, E4M3), host(scale, np.float32)


def differ(ours, theirs) -> dict[str, float]:
    """How many codes and scales differ, and how many codes or ulps apart the furthest are."""
    (codes, scale), (their_codes, their_scale) = ((np.asarray(a) for a in pair) for pair in (ours, theirs))
    apart, ulps = ulp_distance(codes, their_codes), ulp_distance(scale, their_scale)
    return {
        "codes": int((codes.view(np.uint8) != their_codes.view(np.uint8)).sum()),
        "of": codes.size,
        "furthest": int(apart.max()),
        "scales": int((ulps > 0).sum()),
        "of scales": scale.size,
        "ulps": int(ulps.max()),
    }


def assert_equal(ours, theirs):
    found = differ(ours, theirs)
    assert (found["codes"], found["scales"]) == (0, 0), found


def assert_close(ours, theirs, fraction: float, ulps: int):
    """All scales within so many ulps, and no more than this fraction of the codes other, each by one code."""
    found = differ(ours, theirs)
    print(found)
    assert found["ulps"] <= ulps and found["furthest"] <= 1 and found["codes"] <= fraction * found[
        "of"], found


def test_activations_equal_the_cuda_kernel(torch, x):
    assert x.size > 1e7
    assert_equal(quantize_rows(x), group_quant(torch, x))


def test_power_of_two_scales_equal_the_cuda_kernel(torch, x):
    """Where the scale is over the kernel's floor of 1e-10; ours has its floor on amax."""
    above = np.abs(x.astype(np.float32)).reshape(-1, 128).max(1) >= 448e-10
    ours, theirs = quantize_rows(x, power_of_two=True), group_quant(torch, x, ue8m0=True)
    pick = lambda pair: (np.asarray(pair[0]).reshape(-1, 128)[above], np.asarray(pair[1]).reshape(-1)[above])
    assert_equal(pick(ours), pick(theirs))


def test_the_cpu_and_the_gpu_quantise_alike(x):
    """The float64 division of the reference is what makes this so."""
    blocks = np.abs(x.astype(np.float32)).reshape(SHAPE[0] // 128, 128, -1, 128).max((1, 3))
    scale = np.maximum(blocks, np.float32(1e-10)) / np.float32(448)
    codes = np.clip(x.astype(np.float32) / np.kron(scale, np.ones((128, 128), np.float32)), -448,
                    448).astype(E4M3)
    assert_equal(quantize_blocks(x), (codes, scale))


@pytest.mark.parametrize("dtype", [E4M3, ml_dtypes.float8_e5m2])
def test_casts_round_as_ml_dtypes_does(dtype):
    """Every code, every tie between two codes, and the float32 numbers on either side of each."""
    codes = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    codes = np.unique(codes[np.isfinite(codes)])
    ties = (codes[1:] + codes[:-1]) / 2
    values = np.concatenate([codes, ties, np.nextafter(ties, np.float32(np.inf)),
                             np.nextafter(ties, np.float32(-np.inf))])
    got = np.asarray(jax.jit(lambda v: jax.lax.optimization_barrier(v).astype(dtype))(values))
    np.testing.assert_array_equal(got.view(np.uint8), values.astype(dtype).view(np.uint8))


def test_the_triton_kernel_differs_as_its_formula_does(torch):
    """vLLM's fallback for strided input multiplies by 1/448 and divides fast: scales an ulp off, codes at a
    border with them."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

    x = normal(SHAPE, 1)
    strided = torch.empty((SHAPE[0], SHAPE[1] + 128), dtype=torch.bfloat16, device="cuda")[:, : SHAPE[1]]
    strided.copy_(cuda(torch, x))
    codes, scale = per_token_group_quant_fp8(strided, 128, use_ue8m0=False)
    assert_close(quantize_rows(x), (host(codes, E4M3), host(scale, np.float32)), fraction=2e-3, ulps=1)


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_online_weights_differ_as_their_formula_does(torch, mode):
    """vLLM's own quantiser of weights (DeepGEMM's formula). The engine never runs it on the learner's
    weights."""
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    w = normal((2048, 2048), 2, 0.02)
    with torch.compiler.set_stance("force_eager" if mode == "eager" else "default"):
        codes, scale = per_block_cast_to_fp8(cuda(torch, w), [128, 128], False)
    assert_close(quantize_blocks(w), (host(codes, E4M3), host(scale, np.float32)), fraction=2e-3, ulps=1)


def test_deepgemms_cast_differs_as_its_formula_does(torch):
    math = pytest.importorskip("vllm.third_party.deep_gemm.utils.math", exc_type=ImportError,
                               reason="no DeepGEMM here")
    x = normal(SHAPE, 3)
    codes, scale = math.per_token_cast_to_fp8(cuda(torch, x), use_ue8m0=False)
    assert_close(quantize_rows(x), (host(codes, E4M3), host(scale, np.float32)), fraction=2e-3, ulps=1)


def test_deepgemms_power_of_two_scales_are_ours(torch):
    math = pytest.importorskip("vllm.third_party.deep_gemm.utils.math", exc_type=ImportError,
                               reason="no DeepGEMM here")
    x = normal(SHAPE, 4)
    codes, scale = math.per_token_cast_to_fp8(cuda(torch, x), use_ue8m0=True)
    assert_equal(quantize_rows(x, power_of_two=True), (host(codes, E4M3), host(scale, np.float32)))


def test_the_kernel_fused_with_silu_keeps_float32(torch):
    """It quantises silu(gate) * up unrounded, with the floor 2^-9. The learner that rounds to bfloat16 first
    is further off."""
    x = normal((1024, 8192), 5)
    x[:64] *= 2.0**-12  # under the floor
    codes = torch.empty((1024, 4096), dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty((32, 1024), device="cuda").T
    torch.ops._C.silu_and_mul_per_block_quant(codes, cuda(torch, x), scale, 128, None, True)
    theirs = host(codes, E4M3), host(scale, np.float32)
    gate, up = (x[:, half].astype(np.float64) for half in (np.s_[:4096], np.s_[4096:]))
    exact = (gate / (1 + np.exp(-gate)) * up).astype(np.float32)
    rounded = quantize_rows(exact.astype(ml_dtypes.bfloat16), amax_floor=q.FUSED_AMAX_FLOOR)
    print("rounded to bfloat16 first:", differ(rounded, theirs))
    assert_close(quantize_rows(exact, amax_floor=q.FUSED_AMAX_FLOOR), theirs, fraction=1e-3, ulps=16)


@pytest.mark.parametrize("residual", [False, True])
def test_the_kernel_fused_with_rmsnorm_normalises_the_unrounded_sum(torch, residual):
    """It rounds the norm to bfloat16 before and after the weight, as the learner does, but not the sum with
    the residual."""
    x, r, weight = normal((1024, 4096), 6), normal((1024, 4096), 7, 3.0), normal(4096, 8)
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device="cuda")
    scale = torch.empty((32, 1024), device="cuda").T
    device_x, device_r, device_weight = (cuda(torch, a) for a in (x, r, weight))
    torch.ops._C.rms_norm_per_block_quant(
        codes, device_x, device_weight, scale, 1e-6, None, device_r if residual else None, 128, True
    )
    theirs = host(codes, E4M3), host(scale, np.float32)
    total = x.astype(np.float64) + (r.astype(np.float64) if residual else 0)
    print("rounded sum:", differ(normalised(total.astype(ml_dtypes.bfloat16), weight), theirs))
    assert_close(
        normalised(total, weight), theirs, fraction=2e-3, ulps=2**18
    )  # a norm at a border moves by bfloat16 steps of 2^16


def normalised(total: np.ndarray, weight: np.ndarray):
    total = total.astype(np.float64)
    inverse = 1 / np.sqrt(np.square(total).mean(-1, keepdims=True) + 1e-6)
    normed = (total * inverse).astype(np.float32).astype(ml_dtypes.bfloat16)
    out = (normed.astype(np.float32) * weight.astype(np.float32)).astype(ml_dtypes.bfloat16)
    return quantize_rows(out, amax_floor=q.FUSED_AMAX_FLOOR)


def operands(k: int):
    x, w = tile_distinct((256, k), (1, 128), 1), tile_distinct((384, k), (128, 128), 2)
    return (*quantize_rows(x), *quantize_blocks(w))


def exact_product(a, sa, b, sb) -> np.ndarray:
    """In float64, where codes times scales are exact."""
    spread_a = np.repeat(np.asarray(sa, np.float64), 128, 1)
    spread_b = np.kron(np.asarray(sb, np.float64), np.ones((128, 128)))
    return (np.asarray(a).astype(np.float64) * spread_a) @ (np.asarray(b).astype(np.float64) * spread_b).T


def test_the_reference_product_is_float32_on_the_gpu():
    """Not TF32, and not XLA's own FP8 product in its place."""
    a = operands(1024)
    assert relative_l2(jax.jit(matmul.blockwise_matmul)(*a), exact_product(*a)) < 1e-6


def test_cutlass_computes_the_reference_product(torch):
    """The engine's blockwise product: bfloat16 rounding of the output, 1.7e-3, and nothing like a wrong
    scale's 0.5."""
    from vllm._custom_ops import cutlass_scaled_mm

    a, sa, b, sb = operands(1024)
    device_sa = cuda(torch, np.asarray(sa).T).T  # column by column, as the quantiser writes it
    out = cutlass_scaled_mm(
        cuda(torch, np.asarray(a)), cuda(torch, np.asarray(b)).T, device_sa, cuda(torch, np.asarray(sb)).T,
        torch.bfloat16
    )
    assert relative_l2(host(out, ml_dtypes.bfloat16).astype(np.float32),
                       matmul.blockwise_matmul(a, sa, b, sb)) < 3e-3


@pytest.mark.parametrize("n, k", [(384, 256), (6144, 4096), (4096, 12288), (512, 1536)])
@pytest.mark.parametrize("tokens", [1, 8, 100, 2049])
def test_the_tensor_core_product_equals_cutlass_to_the_bit(torch, tokens, n, k):
    """What the learner's forward runs against what the engine runs, at shapes of decode and prefill, rounded
    to bfloat16."""
    from vllm._custom_ops import cutlass_scaled_mm

    (x, sx), (w, sw) = quantize_rows(normal((tokens, k), 1)), quantize_blocks(normal((n, k), 2, 0.02))
    device_sx = cuda(torch, np.asarray(sx).T).T  # column by column, as the quantiser writes it
    out = cutlass_scaled_mm(
        cuda(torch, np.asarray(x)), cuda(torch, np.asarray(w)).T, device_sx, cuda(torch, np.asarray(sw)).T,
        torch.bfloat16
    )
    ours = np.asarray(
        rounding_exact_jit(lambda *a: xla.blockwise_matmul(*a).astype(jnp.bfloat16))(x, sx, w, sw))
    theirs = host(out, ml_dtypes.bfloat16)
    assert (ours != theirs).mean(
        ) == 0, f"{(ours != theirs).mean():.2e} differ, relative l2 {relative_l2(ours, theirs):.1e}"


@pytest.mark.parametrize("k", [128, 4096])
def test_the_emulated_accumulator_errs_as_the_tensor_core_does(torch, k):
    """cuBLASLt with fast accumulation, which never promotes: its error beside that of `short_dot`."""
    a, b = (np.asarray(quantize_rows(normal((256, k), seed).astype(np.float32))[0]) for seed in (1, 2))
    one = torch.ones((), device="cuda")
    out = torch._scaled_mm(
        cuda(torch, a), cuda(torch, b).T, scale_a=one, scale_b=one, out_dtype=torch.float32,
        use_fast_accum=True
    )
    want = a.astype(np.float64) @ b.astype(np.float64).T
    hardware = relative_l2(host(out, np.float32), want)
    emulated = relative_l2(jax.jit(matmul.short_dot)(a[:64], b[:64]), want[:64, :64])
    print(f"K {k}: hardware {hardware:.2e}, emulated {emulated:.2e}")
    assert emulated / 3 < hardware < emulated * 3
