"""`exact_jit`: jax.jit that keeps every rounding the program asks for.

By default XLA may drop a cast to a narrower float and back ("excess precision"). On a GPU that was seen to remove the
rounding of intermediate bfloat16 values in one program and keep it in another, so that the same tokens got different
log-probabilities from prefill, decode and the learner. Everything that computes a log-probability is compiled with this.
"""

from __future__ import annotations

import functools

import jax

exact_jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
