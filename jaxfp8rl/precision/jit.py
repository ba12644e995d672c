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
import os
from pathlib import Path

import jax

from jaxfp8rl.errors import UserError, check_writable

OPTIONS = {"xla_allow_excess_precision": False, "xla_gpu_enable_triton_gemm": False}
rounding_exact_jit = functools.partial(jax.jit, compiler_options=OPTIONS)
gradient_jit = functools.partial(jax.jit,
                                 compiler_options=OPTIONS | {"xla_gpu_enable_dynamic_slice_fusion": False})


KEPT_FROM_S = 0.05  # a publish and the gate have many programs that take less than a second
KEPT_BYTES = 8 * 2**30  # in the default folder: the programs used least recently give way


def default_folder() -> str:
    """The folder for compiled programs of a run that names none: on a GPU jaxfp8rl/compiled in the user's
    cache folder, unless JAX was given one. Empty for a user without a home, and on a CPU, because JAX's key
    does not tell one kind of CPU from another."""
    if jax.config.jax_compilation_cache_dir or jax.default_backend() != "gpu":
        return ""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return "" if root.startswith("~") else str(Path(root, "jaxfp8rl", "compiled"))


def keep_compiled(folder: str) -> str:
    """From now on keep each program that takes KEPT_FROM_S or more to compile in `folder`, and read it from
    there for the same program, compiler and kind of device. Returns the folder in use, or "".

    An empty name stands for `default_folder`, of which KEPT_BYTES are kept; if it cannot be written, nothing
    is kept. Anyone who can write to the folder can make this process run their code. Raises UserError if this
    process cannot write to the `folder` named.
    """
    place = folder or default_folder()
    if not place:
        return jax.config.jax_compilation_cache_dir or ""
    try:
        check_writable(place, "train.compilation_cache")
        Path(place).mkdir(mode=0o700, parents=True, exist_ok=True)
    except (UserError, OSError):
        if folder:
            raise
        return ""
    if not folder:
        jax.config.update("jax_compilation_cache_max_size", KEPT_BYTES)
    jax.config.update("jax_compilation_cache_dir", place)
    seconds = min(jax.config.jax_persistent_cache_min_compile_time_secs, KEPT_FROM_S)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    return place


def check_kept(folder: str) -> None:
    """Raise UserError if this process cannot write to `folder`. The folder need not exist yet."""
    if folder:
        check_writable(folder, "train.compilation_cache")


class KeptPrograms:
    """Counts the programs that JAX reads from the folder of compiled programs, and those that it compiles for
    want of one there."""

    def __init__(self, folder: str):
        self.folder, self.read, self.compiled = folder, 0, 0
        jax.monitoring.register_event_listener(self._count)

    def _count(self, event: str, **_: str | int) -> None:
        self.read += event == "/jax/compilation_cache/cache_hits"
        self.compiled += event == "/jax/compilation_cache/cache_misses"

    def __str__(self) -> str:
        if not self.folder:  # if there is a default all the same, `keep_compiled` could not write to it
            wanted = default_folder()
            return f"compiled programs are not kept: cannot write to {wanted}" if wanted else ""
        return f"compiled programs: {self.read} read from {self.folder}, {self.compiled} added to it"
