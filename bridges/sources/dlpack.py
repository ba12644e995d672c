"""A JAX array as a torch tensor over the same memory, on the CPU and on CUDA.

Lifetime: the view holds a reference to the JAX buffer, so the array may be dropped. Donating it does not
work: JAX 0.11 keeps the donated buffer alive and silently allocates another, which doubles the memory of a
step. Drop every view (`del`) before the next step that donates.

Writes: JAX arrays are immutable, and XLA relies on that. Never write through a view.

Order: the array is ready before it is exported, so that any torch stream may read the view. The reader must
synchronise torch before the array is dropped or donated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridges.api import StackRow

if TYPE_CHECKING:
    import torch


def torch_view(array: Any) -> torch.Tensor:
    """A zero-copy view of `array` (any shape, any float type) as a torch tensor, read-only by convention.

    A StackRow becomes a view into its stack. Any other object with `__dlpack__` is passed to torch directly.
    Raises TypeError for an object without it.
    """
    import torch

    if isinstance(array, StackRow):
        return torch_view(array.stack)[array.index]
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"a {type(array).__name__} has no __dlpack__: pass a JAX array")
    if hasattr(array, "block_until_ready"):
        array.block_until_ready()
        # the array is ready, so no stream has to wait, and looking up the stream would cost time
        return torch.from_dlpack(array.__dlpack__())
    return torch.from_dlpack(array)
