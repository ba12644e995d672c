"""vLLM's linears in four bits: what a checkpoint has of them, and the numbers that their kernels multiply by.

vLLM reads these weights from a checkpoint itself and repacks them for its kernel (Marlin and Humming on
Hopper, its own on a CPU), each in a layout of its own. The numbers of a weight are therefore read off the
product with rows of the identity: a sum with one term that is not zero is exact in any order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from bridges.api import BridgeError, ParamMeta
from bridges.inside_vllm.params import PACKED, is_packed, recorded_tensors

if TYPE_CHECKING:
    import torch

FORMS = "nvfp4", "mxfp4", "int4"  # of compressed-tensors, weights alone
ON_CPU = "int4"  # the one that vLLM's build for CPUs has a kernel for
COLUMNS = 1024  # rows of the identity at a time
PROBES = 16  # rows of random activations
# Relative RMS error of a product. Rounding it to bfloat16 makes 0.0012; activations in INT8 would make 0.009,
# in FP8 0.026.
A16 = 2.0**-8


class Linear(NamedTuple):
    """A linear in four bits, or several that vLLM multiplies as one. parts: (its name, first row, last row +
    1) of each, "model.layers.0.self_attn.q_proj"."""

    module: Any
    parts: tuple[tuple[str, int, int], ...]
    columns: int

    @property
    def has_bias(self) -> bool:
        return getattr(self.module, "bias", None) is not None

    def product(self, x: torch.Tensor, bias: bool = False) -> torch.Tensor:
        """x [M, K] times the weight transposed -> [M, N], by the kernel that generates."""
        return self.module.quant_method.apply(self.module, x, self.module.bias if bias else None)

    def numbers(self, start: int, stop: int, dtype: str) -> torch.Tensor:
        """The columns [stop - start, N] of the weight, transposed, in `dtype`."""
        import torch

        eye = torch.zeros(stop - start, self.columns, dtype=getattr(torch, dtype), device=self.device)
        eye[:, start:stop].fill_diagonal_(1)
        return self.product(eye)

    def bias(self, dtype: str) -> torch.Tensor:
        """[N]: what the product adds. A kernel may keep a bias in another order."""
        import torch

        zeros = torch.zeros(1, self.columns, dtype=getattr(torch, dtype), device=self.device)
        return self.product(zeros, bias=True)[0]

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    def live(self) -> dict[str, torch.Tensor]:
        """Every tensor of the linear as its kernel holds it."""
        named = self.module.named_parameters(recurse=False)
        return {f"{self.parts[0][0]}.{leaf}": p.data for leaf, p in named if p.numel()}


def linears(model: Any) -> tuple[Linear, ...]:
    """The linears of the model that are in four bits."""
    fused, found = getattr(model, "packed_modules_mapping", {}), []
    for path, module in model.named_modules():
        if not is_packed(module):
            continue
        parent, _, last = path.removesuffix(".base_layer").rpartition(".")
        names, sizes = fused.get(last, [last]), module.output_partition_sizes
        parts, start = [], 0
        for name, size in zip(names, sizes, strict=True):
            parts.append((f"{parent}.{name}", start, start + size))
            start += size
        found.append(Linear(module, tuple(parts), module.input_size_per_partition))
    return tuple(found)


def manifest_of(linear: Linear, dtype: str) -> Iterator[ParamMeta]:
    """The tensors of a linear that a source must have: packed codes, uint8 [N, K/2], their scales, the
    divisor of NVFP4, and the bias in `dtype`."""
    recorded = recorded_tensors(linear.module)
    scale = recorded["weight_scale"]
    for name, start, stop in linear.parts:
        rows = stop - start
        yield ParamMeta(f"{name}.{PACKED}", "uint8", (rows, linear.columns // 2))
        yield ParamMeta(f"{name}.weight_scale", str(scale.dtype).removeprefix("torch."),
                        (rows, *scale.shape[1:]))
        if "weight_global_scale" in recorded:
            yield ParamMeta(f"{name}.weight_global_scale", "float32", ())
        if linear.has_bias:
            yield ParamMeta(f"{name}.bias", dtype, (rows,))


def activations(model: Any, dtype: str) -> str:
    """`dtype`, once the product of one linear is seen to take activations in it. Raises BridgeError for a
    model without such linears, and for a kernel that quantises activations."""
    import torch

    found = linears(model)
    if not found:
        raise BridgeError("no linear of this model is in four bits",
                          "name a checkpoint of compressed-tensors whose config.json has a "
                          "quantization_config")
    smallest = min(found, key=lambda linear: linear.columns * linear.parts[-1][2])
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(PROBES, smallest.columns, generator=draw).to(smallest.device, getattr(torch, dtype))
    with torch.inference_mode():
        have = smallest.product(x).float()
        want = torch.zeros_like(have)
        for start in range(0, smallest.columns, COLUMNS):
            stop = min(start + COLUMNS, smallest.columns)
            want += x[:, start:stop].float() @ smallest.numbers(start, stop, dtype).float()
    if (have - want).norm() > A16 * want.norm():
        raise BridgeError(f"vLLM's kernel {kernel(smallest)} quantises the activations of "
                          f"weights in four bits",
                          "unset VLLM_MARLIN_INPUT_DTYPE, VLLM_HUMMING_INPUT_QUANT_CONFIG and, on a CPU, "
                          "VLLM_CPU_INT4_W4A8, or set VLLM_DISABLED_KERNELS to its name")
    return dtype


def kernel(linear: Linear) -> str:
    """The name of the kernel of a linear, or of the scheme that has it."""
    scheme = getattr(linear.module, "scheme", None)
    return type(getattr(scheme, "kernel", None) or scheme or linear.module.quant_method).__name__
