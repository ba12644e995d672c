"""Find the live tensors of a vLLM model that equal the checkpoint's byte for byte and can be written in
place.

vLLM may repack, transpose, pad or consume the weights that it loads. Nothing is assumed: each tensor must
belong to a method and a kernel listed here and have the checkpoint's dtype, shape and strides, and every row
of every parameter must belong to a tensor of the checkpoint.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bridges.api import BridgeError, ParamMeta
from bridges.inside_vllm import fp8_emulation
from bridges.inside_vllm.params import Place, is_packed, places, vocabulary_rows

if TYPE_CHECKING:
    import torch

METHODS = {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "Fp8LinearMethod"}
KERNELS = {
    "DeepGemmFp8BlockScaledMMKernel", "CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel",
    fp8_emulation.NAME,
}
# methods of experts, with the attribute that names the kernel
EXPERT_METHODS = {"Fp8MoEMethod": "fp8_backend", "UnquantizedFusedMoEMethod": "unquantized_backend"}
EXPERT_KERNELS = {"TRITON"}  # vLLM's choice on Hopper; others swap gate and up, or shuffle rows
# modules that keep tensors computed from weights, which only vLLM's own loader renews
DERIVING = {"MLAAttention"}
WAY_OUT = 'publish by vLLM\'s own reload: transport VllmReload, rollout.publish = "reload"'


@dataclasses.dataclass(frozen=True)
class LiveRows:
    """A published tensor in the engine: `tensor` is parameter[start:stop], or the parameter itself if it is a
    single number. For stacked experts, `parameter` is that of one expert. `address`: that of vLLM's whole
    parameter.
    """

    meta: ParamMeta
    place: Place
    parameter: torch.Tensor
    start: int
    stop: int
    address: int

    @property
    def tensor(self) -> torch.Tensor:
        return self.parameter[self.start : self.stop] if self.parameter.dim() else self.parameter

    def moved(self) -> bool:
        """Whether the model has replaced the parameter since."""
        return getattr(self.place.module, self.place.leaf).data_ptr() != self.address


def live_rows(model: Any) -> tuple[LiveRows, ...]:
    """Every checkpoint tensor, in the order of the model. Raises BridgeError, which names the tensor, for an
    unknown layout."""
    found = []
    for place in places(model):
        if problem := _problem(place):
            raise BridgeError(f"{place.meta.name} cannot be written in place: {problem}", WAY_OUT)
        found.append(_live(place))
    _check_complete(model, found)
    return tuple(found)


def scalars(places: Sequence[Place]) -> tuple[LiveRows, ...]:
    """Tensors of a single number, such as the scales of FP8 attention."""
    return tuple(map(_live, places))


def _live(place: Place) -> LiveRows:
    whole = getattr(place.module, place.leaf).data
    parameter = whole if place.expert is None else whole[place.expert]
    return LiveRows(place.meta, place, parameter, place.start, place.start + (place.meta.shape or (1,))[0],
                    whole.data_ptr())


def packed_copies(model: Any) -> list[Any]:
    """Embeddings and lm_heads of which vLLM's CPU build also keeps a packed copy. Their quant_method must
    process the weights again after they are written."""
    packed = (module for module in model.modules() if hasattr(module, "cpu_linear"))
    return [module for module in packed if type(module.quant_method).__name__ == "UnquantizedEmbeddingMethod"]


def _problem(p: Place) -> str | None:
    method = getattr(p.module, "quant_method", None)
    kernel = type(getattr(method, "fp8_linear", None)).__name__
    if p.expert is not None:
        return _problem_of_experts(method) or _difference(getattr(p.module, p.leaf, None), p)
    if type(method).__name__ not in METHODS:
        return f"the layout of {type(method).__name__} is not known here"
    if type(method).__name__ == "Fp8LinearMethod" and kernel not in KERNELS:
        return f"the layout of {kernel} is not known here (known: {', '.join(sorted(KERNELS))})"
    return _difference(getattr(p.module, p.leaf, None), p)


def _problem_of_experts(method: Any) -> str | None:
    name = type(method).__name__
    if name not in EXPERT_METHODS:
        return f"the layout of {name} is not known here"
    kernel = getattr(getattr(method, EXPERT_METHODS[name], None), "name", None)
    if kernel not in EXPERT_KERNELS:
        return (f"it belongs to a stack of experts, and {kernel}'s layout of these is not known here "
                "(known: TRITON)")
    return None


def _difference(live: Any, p: Place) -> str | None:
    if live is None:
        return f"{p.path} has no {p.leaf} any more"
    have = (str(live.dtype).removeprefix("torch."), tuple(live.shape), live.is_contiguous())
    want = (p.meta.dtype, p.shape, True)
    if have != want:
        return (f"vLLM holds {p.path}.{p.leaf} as (dtype, shape, row-major) {have}, "
                f"but its checkpoint layout is {want}")
    return None


def _check_complete(model: Any, rows: list[LiveRows]) -> None:
    """Raise BridgeError unless the checkpoint's tensors fill every row of every parameter, except for the
    padding of the vocabulary, linears in four bits, which are not written, and the scales and zero points of
    attention, which a checkpoint need not have."""
    filled = collections.Counter()
    for r in rows:
        filled[r.address] += r.stop - r.start
        if padding := r.parameter.shape[0] - vocabulary_rows(r.place.module, r.parameter.shape[0]):
            filled[r.address] += padding
    spared = {id(p) for module in model.modules() if is_packed(module) or hasattr(module, "_k_scale")
              for p in module.parameters(recurse=False)}
    for name, parameter in model.named_parameters():
        if id(parameter) in spared:
            continue
        # stacked experts count the rows of all experts
        count = math.prod(parameter.shape[: 2 if parameter.dim() == 3 else 1])
        if parameter.dim() and filled[parameter.data_ptr()] != count:
            raise BridgeError(
                f"{name} cannot be written in place: {filled[parameter.data_ptr()]} of its {count} "
                "rows are in a checkpoint", WAY_OUT)
    if deriving := sorted({type(m).__name__ for m in model.modules()} & DERIVING):
        raise BridgeError(
            f"the model cannot be written in place: {deriving[0]} computes other tensors from its weights",
            WAY_OUT)
