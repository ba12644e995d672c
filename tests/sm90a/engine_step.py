"""The decoding loop of the embedded engine and the shapes of its arguments, to be lowered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bridges.api import GenRequest, SamplingParams
from bridges.engines import batch
from bridges.engines.flight import Flight
from bridges.engines.flights import Flights


def engine_step(functions: Any, flights: Flights, params: Any, sequences: int,
                new_tokens: int) -> tuple[Callable, ...]:
    """(the jitted loop of 64 steps, its arguments) for as many completions of so many tokens."""
    how = GenRequest("r", (1,), SamplingParams(new_tokens), sequences)
    shape = flights.shape_of([Flight(how, i, (0, 0), i) for i in range(sequences)])
    made = jax.eval_shape(functools.partial(
        batch.empty, functions, rows=shape.rows, sequences=sequences, pages=shape.pages,
        row_pages=shape.row_pages,
        max_new=shape.max_new, support=0, width=flights._width(params)))
    like = lambda dtype, *more: jax.ShapeDtypeStruct((sequences, *more), dtype)
    orders = batch.Orders(*(like(jnp.int32) for _ in range(4)), like(jnp.uint32, 2), like(jnp.float32),
                          like(bool),
                          like(jnp.int32), like(jnp.float32), like(jnp.int32, shape.stops),
                          like(jnp.int32, 1))
    advance = jax.jit(functools.partial(batch.advance, functions, steps=64, filters=shape.filters),
                      donate_argnums=1)
    one = lambda dtype: jax.ShapeDtypeStruct((), dtype)
    return advance, params, made, orders, like(jnp.int32), one(jnp.int32), one(bool)
