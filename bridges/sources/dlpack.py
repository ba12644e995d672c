"""A JAX array as a torch tensor over the same memory, on the CPU and on CUDA.

Lifetime: the view holds a reference to the JAX buffer, so the array may be dropped. Donating it does not
work: JAX 0.11 keeps the donated buffer alive and silently allocates another, which doubles the memory of a
step. Drop every view (`del`) before the next step that donates.

Writes: JAX arrays are immutable, and XLA relies on that. Never write through a view.

Order: the array is ready before it is exported, so that any torch stream may read the view. The reader must
synchronise torch before the array is dropped or donated.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from bridges.api import StackRow

if TYPE_CHECKING:
    import torch


@functools.cache
def torch_takes_fp8() -> bool:
    """Whether this torch accepts float8_e4m3fn through DLPack (2.11 and 2.13 do, from JAX 0.11). The result
    is cached."""
    import jax.numpy as jnp
    import torch

    try:
        return torch.from_dlpack(
            jnp.zeros((1,), jnp.float8_e4m3fn).block_until_ready()).dtype is torch.float8_e4m3fn
    except (BufferError, RuntimeError, TypeError, ValueError):
        return False


def torch_view(array: Any) -> torch.Tensor:
    """A zero-copy view of `array` (any shape, any float type) as a torch tensor, read-only by convention.

    If torch does not accept FP8 through DLPack, the codes are passed as uint8, which costs one copy in JAX,
    and reinterpreted. A StackRow becomes a view into its stack. Any other object with `__dlpack__` is passed
    to torch directly. Raises TypeError for an object without it.
    """
    import torch

    if isinstance(array, StackRow):
        return torch_view(array.stack)[array.index]
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"a {type(array).__name__} has no __dlpack__: pass a JAX array")
    if hasattr(array, "block_until_ready"):
        array.block_until_ready()
        if not torch_takes_fp8() and array.dtype.name in ("float8_e4m3fn", "float8_e5m2"):
            return torch.from_dlpack(_codes(array)).view(getattr(torch, array.dtype.name))
        # the array is ready, so no stream has to wait, and looking up the stream would cost time
        return torch.from_dlpack(array.__dlpack__())
    return torch.from_dlpack(array)


def _codes(array: Any) -> Any:
    """The bytes of an FP8 array as uint8 of the same shape."""
    import jax

    return jax.lax.bitcast_convert_type(array, "uint8").block_until_ready()
