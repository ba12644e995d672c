"""`rounding_exact_jit` and `gradient_jit`: jax.jit with every rounding that the program asks for, and with
the engine's way to multiply matrices. `gradient_jit` is for differentiated programs.

By default XLA may drop a cast to a narrower float type and back ("excess precision"). On a GPU it removed the
rounding of intermediate bfloat16 values in one program and kept it in another. The same tokens then got
different log-probabilities from prefill, from decode and from the learner. So every program that computes a
log-probability is compiled with these options.

cuBLAS computes the products of matrices, as it does in the engine. XLA's own kernels sum in another order,
and for FP8 in another precision. XLA would also choose between cuBLAS and its kernels anew for every shape.

In a differentiated program the result of a kernel goes to two places: to the stack that the backward pass
reads, and to the rest of the layer. XLA would fuse the kernel with the write to the stack, and run the kernel
again for the rest of the layer. In the trace of an 8B update on an H200, attention ran twice, and in FP8 so
did the products of q, k, v and o. With the option of `gradient_jit` XLA copies the result instead.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax

from jaxfp8rl.errors import check_writable

OPTIONS = {"xla_allow_excess_precision": False, "xla_gpu_enable_triton_gemm": False}
rounding_exact_jit = functools.partial(jax.jit, compiler_options=OPTIONS)
gradient_jit = functools.partial(jax.jit,
                                 compiler_options=OPTIONS | {"xla_gpu_enable_dynamic_slice_fusion": False})


def keep_compiled(folder: str) -> None:
    """From now on keep each program that takes a second or more to compile in `folder`, and read it from
    there for the same program, compiler and kind of device.

    Anyone who can write to the folder can make this process run their code. An empty name changes nothing.
    Raises UserError if this process cannot write to the folder.
    """
    if not folder:
        return
    check_kept(folder)
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", folder)


def check_kept(folder: str) -> None:
    """Raise UserError if this process cannot write to `folder`. The folder need not exist yet."""
    if folder:
        check_writable(folder, "train.compilation_cache")
