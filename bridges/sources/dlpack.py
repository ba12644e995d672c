"""A JAX array as a torch tensor over the same memory, on the CPU and on CUDA.

Lifetime. The view holds a reference on the JAX buffer, so dropping the array is safe; *donating* it is not
part of the contract: JAX 0.11 keeps the donated buffer alive and silently allocates another, which doubles
the memory of a step. So drop every view (`del`) before the next donating step.

Writes. JAX arrays are immutable and XLA assumes so: never write through a view.

Order. The array is ready before it is exported, so the view may be read on any torch stream. The other
direction is the reader's: synchronise torch before the array is dropped or donated.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from bridges.api import StackRow

if TYPE_CHECKING:
    import torch


@functools.cache
def torch_takes_fp8() -> bool:
    """Whether this torch accepts float8_e4m3fn through DLPack (2.11 and 2.13 do, from JAX 0.11). Asked
    once."""
    import jax.numpy as jnp
    import torch

    try:
        return torch.from_dlpack(
            jnp.zeros((1,), jnp.float8_e4m3fn).block_until_ready()).dtype is torch.float8_e4m3fn
    except (BufferError, RuntimeError, TypeError, ValueError):
        return False


def torch_view(array: Any) -> torch.Tensor:
    """View of `array` (any shape, any float type) as a torch tensor: zero copy, read-only by convention.

    Where torch cannot take FP8 through DLPack the codes travel as uint8, which costs one copy in JAX, and are
    reinterpreted: same bytes, same shape. A StackRow is a view into its stack. Any other object with
    `__dlpack__` is taken as it is. Raises TypeError for an object without.
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
        # it is ready: no stream need wait, and asking which one costs more
        return torch.from_dlpack(array.__dlpack__())
    return torch.from_dlpack(array)


def _codes(array: Any) -> Any:
    """The bytes of an FP8 array as uint8 of the same shape."""
    import jax

    return jax.lax.bitcast_convert_type(array, "uint8").block_until_ready()
