"""`rounding_exact_jit` and, for what is differentiated, `gradient_jit`: jax.jit that keeps every rounding the program
asks for, and multiplies matrices as the engine does.

By default XLA may drop a cast to a narrower float and back ("excess precision"). On a GPU that was seen to
remove the rounding of intermediate bfloat16 values in one program and keep it in another, so that the same
tokens got different log-probabilities from prefill, decode and the learner. Everything that computes a
log-probability is compiled with this.

Products of matrices are left to cuBLAS, as they are in the engine. XLA's own kernels sum in another order,
which for FP8 also means in another precision, and XLA would choose between the two anew for every shape.

In a differentiated program a kernel's result goes to a stack of what is kept for the backward pass, and to
the rest of the layer. XLA would fuse the kernel with its writing to the stack, and run it a second time for
the rest: seen in the trace of an 8B update on an H200, where attention and, in FP8, the products of q, k, v
and o were computed twice. `gradient_jit` has it copy the result.
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
    """From here on programs that take a second or more to compile are kept in `folder`, and read from it
    where they are there: for the same program, compiler and kind of device. Who can write to it can have this
    process run what they like. An empty name changes nothing. Raises UserError where nothing can be kept
    there."""
    if not folder:
        return
    check_kept(folder)
    Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", folder)


def check_kept(folder: str) -> None:
    """Raise UserError where nothing can be kept in `folder`, which need not be there yet."""
    if folder:
        check_writable(folder, "train.compilation_cache")
