"""Functions of rows whose bits do not depend on how many rows there are, on a CPU.

XLA for CPUs chooses another product, and adds up in another order, for other numbers of rows. Here it always
sees ROWS of them, in a loop that has two turns at least, as a loop of one would become part of what surrounds
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

ROWS = 8


def by_rows(f: Callable, *xs: Any) -> Any:
    """f(*xs) for a function of rows: arrays with a leading axis of N rows, in any trees, to others like that.
    A row of the result is a function of that row of xs alone, bit for bit, whatever N is and wherever the row
    stands."""
    count = len(jax.tree.leaves(xs)[0])
    blocks = max(2, -(-count // ROWS))

    def cut(x):
        x = jnp.pad(x, ((0, blocks * ROWS - count), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(blocks, ROWS, *x.shape[1:])

    def one(block):
        return lax.optimization_barrier(f(*lax.optimization_barrier(block)))

    made = lax.map(one, jax.tree.map(cut, xs))
    return jax.tree.map(lambda y: y.reshape(-1, *y.shape[2:])[:count], made)
