"""A calculator that reads an expression and never runs it as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

LONGEST = 200  # characters of an expression
BITS = 4096  # of the largest integer
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}


def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    expression: numbers, parentheses and the operators + - * / // % **, for example "(3 + 4) * 12"
    """
    if len(expression) > LONGEST:
        raise ValueError(f"an expression has at most {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    value = _value(tree)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value)


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _applied(type(op), _value(left), _value(right))
    raise ValueError("only numbers, parentheses and + - * / // % ** are allowed")


def _applied(op: type, a: int | float, b: int | float) -> int | float:
    if op is ast.Pow and isinstance(a, int) and isinstance(b,
                                                           int) and abs(a) > 1 and b * a.bit_length() > BITS:
        raise ValueError("the result is too large")
    value = OPERATORS[op](a, b)
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError("the result is not a real number")
    if isinstance(value, int) and value.bit_length() > BITS:
        raise ValueError("the result is too large")
    return value
