"""Checks of a call against jaxtyping's annotations. Only tests check them: production code calls
unchecked."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from jaxtyping import AbstractArray, jaxtyped


class WrongShape(AssertionError):
    """An argument, a result or a field that does not fit its annotation."""


def checked(function: Callable) -> Callable:
    """`function`, with its arguments and its result checked against their annotations. A letter has one size
    per call."""
    signature, hints = inspect.signature(function), typing.get_type_hints(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with jaxtyped("context"):
            for name, value in signature.bind(*args, **kwargs).arguments.items():
                _check(name, value, hints.get(name))
            result = function(*args, **kwargs)
            _check("the result", result, hints.get("return"))
        return result

    return call


def shapes_in(hint: Any) -> list[type]:
    """All annotations of arrays inside `hint`."""
    if _is_shape(hint):
        return [hint]
    return [shape for inner in typing.get_args(hint) for shape in shapes_in(inner)]


def _is_shape(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, AbstractArray)


def _check(name: str, value: Any, hint: Any) -> None:
    """Raise WrongShape unless `value` fits `hint`, as far as `hint` concerns arrays."""
    kind, inner = typing.get_origin(hint), typing.get_args(hint)
    if _is_shape(hint):
        if not isinstance(value, hint):
            raise WrongShape(f"{name} is not {hint.__name__}: {getattr(value, 'dtype', type(value))} "
                             f"{getattr(value, 'shape', '')}")
    elif kind in (typing.Union, types.UnionType):
        if shapes_in(hint) and not any(_fits(name, value, each) for each in inner):
            raise WrongShape(f"{name} is not {hint}")
    elif isinstance(hint, type) and hasattr(hint, "_fields"):
        for field, annotation in typing.get_type_hints(hint).items():
            _check(f"{name}.{field}", getattr(value, field), annotation)
    elif shapes_in(hint):
        for key, entry, each in _entries(name, value, kind, inner):
            _check(f"{name}[{key!r}]", entry, each)


def _entries(name: str, value: Any, kind: Any, inner: tuple) -> Iterable[tuple[Any, Any, Any]]:
    """(key, entry, its annotation) of a container."""
    if not isinstance(value, kind) or (kind is tuple and len(value) != len(inner)):
        raise WrongShape(f"{name} is not {kind.__name__} of {inner}: {type(value)}")
    if kind is tuple:
        return zip(range(len(inner)), value, inner)
    if kind is dict:
        return ((key, entry, inner[1]) for key, entry in value.items())
    return ((i, entry, inner[0]) for i, entry in enumerate(value))


def _fits(name: str, value: Any, hint: Any) -> bool:
    if not shapes_in(hint):
        return isinstance(value, hint)
    try:
        _check(name, value, hint)
    except WrongShape:
        return False
    return True
