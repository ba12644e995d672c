"""Write rows into vLLM's live tensors, in this process or in a worker of a server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bridges.api import BridgeError
from bridges.inside_vllm.environment import on_cpu
from bridges.inside_vllm.layout import LiveRows
from bridges.inside_vllm.stacks import stack_of

if TYPE_CHECKING:
    import torch


def span(rows: Sequence[LiveRows]) -> torch.Tensor:
    """The engine's tensors of a stack's rows: [n, *shape]."""
    stack, first = stack_of(rows), rows[0]
    return stack[:, first.start : first.stop] if stack.dim() > 1 else stack


def copy_rows(target: torch.Tensor, rows: torch.Tensor) -> None:
    """Copy rows [n, ...]. The copy engine copies contiguous rows in one call; for parts of a fused stack, and
    for columns, a kernel copies the widest possible elements."""
    if target.dim() > 1 and not (target.is_contiguous() and rows.is_contiguous()):
        target, rows = _widest(target, rows)
    target.copy_(rows)


class Copies:
    """Copies of rows between places that stay where they are, prepared once. A few calls run them all, by the
    widest words: a call for each tensor would take longer than its bytes."""

    def __init__(self) -> None:
        self._lists: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        self._others: list[tuple[torch.Tensor, torch.Tensor]] = []

    def add(self, target: torch.Tensor, rows: torch.Tensor) -> None:
        import torch

        if not (target.is_contiguous() and rows.is_contiguous()):
            self._others.append((target, rows))
            return
        bytes_ = rows.nbytes | target.data_ptr() | rows.data_ptr()
        word = next(t for t in (torch.int64, torch.int32, torch.uint8) if not bytes_ % t.itemsize)
        targets, sources = self._lists.setdefault(word, ([], []))
        targets.append(target.view(-1).view(word)), sources.append(rows.view(-1).view(word))

    def run(self) -> None:
        """Nobody has waited for them when it returns."""
        import torch

        for targets, rows in self._lists.values():
            torch._foreach_copy_(targets, rows)  # pyright: ignore[reportPrivateImportUsage]
        for target, rows in self._others:
            copy_rows(target, rows)


def _widest(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """[n, ...] with gaps only between the n -> [n, words] of 16 bytes, where all rows are whole words."""
    import torch

    flat = [x.flatten(1).view(torch.uint8) for x in tensors]
    whole = not any(n % 16 for x in flat for n in (x.shape[1], x.stride(0), x.data_ptr()))
    return [x.view(torch.complex128) for x in flat] if whole else flat


def check_addresses(rows: Sequence[LiveRows]) -> None:
    """Raise BridgeError if the model has replaced a parameter: CUDA graphs read its old address."""
    if moved := [r.meta.name for r in rows if r.moved()]:
        raise BridgeError(
            f"{moved[0]} has moved since the transport was opened, but CUDA graphs read its old address",
            "open the transport on a new engine")


def renew_packed(modules: Sequence[Any]) -> None:
    """Make the packed copies that vLLM's CPU build keeps of some weights (`layout.packed_copies`) again."""
    for module in modules:
        module.quant_method.process_weights_after_loading(module)


def repack_experts(model: Any) -> None:
    """Pack the experts of vLLM's CPU build again, after vLLM's own reload.

    vLLM 0.32 packs unquantised experts for its CPU kernels only when they are first loaded. A reload silently
    copies checkpoint layout into the packed tensors.
    """
    if not on_cpu():
        return
    for module in model.modules():
        kernel: Any = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts: Any = getattr(kernel, "fused_experts", None)
        if hasattr(module, "w13_weight") and hasattr(experts, "isa"):
            experts.process_weights_after_loading(module)
