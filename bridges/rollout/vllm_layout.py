"""Where the live tensors of a vLLM model are the checkpoint's, byte for byte, so that they may be written in place.

vLLM may repack, transpose, pad or consume what it loads. Nothing is assumed: each tensor must be held by a method and a kernel
named here, with the checkpoint's type, shape and strides, and every row of every parameter must belong to some tensor.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bridges.api import BridgeError, ParamMeta
from bridges.rollout import vllm_fp8_emulation
from bridges.rollout.vllm_params import Place, places

if TYPE_CHECKING:
    import torch

METHODS = {"NoneType", "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod", "Fp8LinearMethod"}
KERNELS = {
    "DeepGemmFp8BlockScaledMMKernel", "CutlassFp8BlockScaledMMKernel", "TritonFp8BlockScaledMMKernel", vllm_fp8_emulation.NAME,
}  # fmt: skip
DERIVING = {"MLAAttention"}  # keep tensors computed from weights, which only vLLM's own loading renews
WAY_OUT = 'publish by vLLM\'s own reload: transport VllmReload, rollout.publish = "reload"'


@dataclasses.dataclass(frozen=True)
class LiveRows:
    """A published tensor in the engine: `tensor` is parameter[start:stop], or the parameter itself where that is one number."""

    meta: ParamMeta
    place: Place
    parameter: torch.Tensor
    start: int
    stop: int

    @property
    def tensor(self) -> torch.Tensor:
        return self.parameter[self.start : self.stop] if self.parameter.dim() else self.parameter

    def moved(self) -> bool:
        """Whether the model has another tensor there by now."""
        return getattr(self.place.module, self.place.leaf).data_ptr() != self.parameter.data_ptr()


def live_rows(model: Any, block: tuple[int, int]) -> tuple[LiveRows, ...]:
    """Every checkpoint tensor in the order of the model. Raises BridgeError, naming the tensor, for a layout not known."""
    found = []
    for place in places(model, block):
        if problem := _problem(place):
            raise BridgeError(f"{place.meta.name} cannot be written in place: {problem}", WAY_OUT)
        parameter = getattr(place.module, place.leaf).data
        found.append(LiveRows(place.meta, place, parameter, place.start, place.start + place.meta.shape[0]))
    _check_complete(model, found)
    return tuple(found)


def scalars(places: Sequence[Place]) -> tuple[LiveRows, ...]:
    """Tensors of one number each, as the scales of attention are."""
    return tuple(LiveRows(p.meta, p, getattr(p.module, p.leaf), 0, 1) for p in places)


def packed_copies(model: Any) -> list[Any]:
    """Embeddings and lm_heads beside whose weight vLLM's CPU build keeps a packed copy: their quant_method must process the
    weights again after they were written."""
    packed = (module for module in model.modules() if hasattr(module, "cpu_linear"))
    return [module for module in packed if type(module.quant_method).__name__ == "UnquantizedEmbeddingMethod"]


def _problem(p: Place) -> str | None:
    method = getattr(p.module, "quant_method", None)
    kernel = type(getattr(method, "fp8_linear", None)).__name__
    if p.start is None:
        return "it is one of a stack of experts, whose kernels shuffle it"
    if type(method).__name__ not in METHODS:
        return f"how {type(method).__name__} keeps it is not known here"
    if type(method).__name__ == "Fp8LinearMethod" and kernel not in KERNELS:
        return f"how {kernel} keeps it is not known here (known: {', '.join(sorted(KERNELS))})"
    return _difference(getattr(p.module, p.leaf, None), p)


def _difference(live: Any, p: Place) -> str | None:
    if live is None:
        return f"{p.path} has no {p.leaf} any more"
    have = (str(live.dtype).removeprefix("torch."), tuple(live.shape), live.is_contiguous())
    want = (p.meta.dtype, p.shape, True)
    if have != want:
        return f"vLLM holds {p.path}.{p.leaf} as (dtype, shape, row-major) {have}, its checkpoint layout is {want}"
    return None


def _check_complete(model: Any, rows: list[LiveRows]) -> None:
    """No element of a parameter may be left that no tensor of the checkpoint fills, but for the padding of a vocabulary."""
    filled = collections.Counter()
    for r in rows:
        filled[r.parameter.data_ptr()] += r.stop - r.start
        if padding := r.parameter.shape[0] - getattr(r.place.module, "org_vocab_size", r.parameter.shape[0]):
            filled[r.parameter.data_ptr()] += padding
    for name, parameter in model.named_parameters():
        if parameter.dim() and filled[parameter.data_ptr()] != parameter.shape[0]:
            raise BridgeError(f"{name} cannot be written in place: {filled[parameter.data_ptr()]} of its {parameter.shape[0]} "
                              "rows are a checkpoint's", WAY_OUT)  # fmt: skip
    if deriving := sorted({type(m).__name__ for m in model.modules()} & DERIVING):
        raise BridgeError(f"the model cannot be written in place: {deriving[0]} computes other tensors from its weights", WAY_OUT)
