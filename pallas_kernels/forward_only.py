"""Functions without a derivative raise an error if one is computed.

A code is a step function of the number that it represents. JAX would differentiate it silently: the cotangent
of a code is itself cast to FP8, in which a gradient below 2^-10 is 0 and one above 464 is NaN. And a Pallas
kernel has no derivative at all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

F = TypeVar("F", bound=Callable)


def forward_only(instead: str) -> Callable[[F], F]:
    """Decorator of a function of arrays: computing any derivative of it raises a TypeError that ends in
    `instead`, the recommended alternative.

    Derivatives that are not needed raise nothing: those of another argument, of an auxiliary result, or of a
    result that passes through `stop_gradient` afterwards (except in a `jax.jvp` outside `jit`, which computes
    all of them).
    """

    def decorate(f: F) -> F:
        message = f"{f.__module__}.{f.__name__} has no derivative: {instead}"

        @functools.wraps(f)
        def run(*args: Any, **kwargs: Any) -> Any:
            inputs = [x for x in jax.tree.leaves((args, kwargs)) if _may_have_tangent(x)]
            if not inputs:
                return f(*args, **kwargs)
            stop = lambda x: lax.stop_gradient(x) if _may_have_tangent(x) else x
            args, kwargs = jax.tree.map(stop, (args, kwargs))
            return _results(message, f(*args, **kwargs), inputs)

        return cast(F, run)

    return decorate


def _may_have_tangent(x: Any) -> bool:
    return isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.inexact)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _results(message: str, results: Any, inputs: list[Array]) -> Any:
    """The results. Their tangents must not be computed if any input has one."""
    return results


@functools.partial(_results.defjvp, symbolic_zeros=True)
def _(message: str, primals: tuple, tangents: tuple) -> tuple:
    (results, _), (unknown, of_inputs) = primals, tangents
    some = [t for t in of_inputs if not isinstance(t, SymbolicZero)]
    if not some:
        return results, unknown
    total = lambda t: jnp.sum(_no_derivative.bind(t, message=message).astype(jnp.float32))
    none = sum(map(total, some), jnp.float32(0))
    return results, jax.tree.map(lambda y: _like(y, none), results)


def _like(y: Array, none: Array) -> Any:
    """A tangent of y; integers, as of codes in four bits, have one without numbers."""
    if jnp.issubdtype(y.dtype, jnp.inexact):
        return jnp.full(y.shape, none.astype(y.dtype))
    return np.zeros(y.shape, jax.dtypes.float0)


def _refuse(*_: Any, message: str) -> NoReturn:
    raise TypeError(message)


_no_derivative = Primitive("no_derivative")  # a linear function that is traced but never executed
_no_derivative.def_abstract_eval(lambda t, message: t)
_no_derivative.def_impl(_refuse)
ad.deflinear2(_no_derivative, lambda ct, t, message: _refuse(message=message))
batching.defvectorized(_no_derivative)
mlir.register_lowering(_no_derivative, lambda ctx, t, message: _refuse(message=message))
