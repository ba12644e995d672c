"""The base class of the configuration's sections, and the types that they share."""

from __future__ import annotations

import datetime
import math
import os
import re
from typing import Annotated, Any, Literal

import pydantic

from jaxfp8rl.data.tokenizer import CHARS_PREFIX

FloatType = Literal["float32", "bfloat16", "float16"]


def day(text: str) -> str:
    """The ISO date of `text`. Raises ValueError, which pydantic reports, if it has none."""
    return datetime.date.fromisoformat(text).isoformat()


def listed(value: Any) -> Any:
    """A list, of which a single item may be given alone."""
    return (value,) if isinstance(value, int | str) and not isinstance(value, bool) else value


def size_or_auto(value: Any) -> Any:
    """A number above 0, "auto", or None. Raises ValueError, which pydantic reports, for anything else."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None or value == "auto" or (number and 0 < value < math.inf):
        return value
    shown = f'"{value}"' if isinstance(value, str) else value
    raise ValueError(f'expected a number greater than 0, or "auto", got {shown}')


def _expanded(path: str) -> str:
    """The path with ~ and $NAME replaced, as a shell would. Raises ValueError for a name that is not set."""
    if path.startswith(CHARS_PREFIX):
        return path
    found = os.path.expanduser(os.path.expandvars(path))
    if unset := re.search(r"\$(\w+|\{\w+\})", found):
        raise ValueError(f"{path}: the environment has no {unset[0]}")
    return found


File = Annotated[str, pydantic.AfterValidator(_expanded)]  # the name of a file or folder


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def headline(cls) -> str:
        """The first sentence of the docstring, on one line."""
        return re.split(r"(?<=\.) ", " ".join((cls.__doc__ or "").split()))[0]
