"""`--section.key VALUE` on the command line: what it says, and its place in the data of a TOML file."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxfp8rl.config.schema import SECTIONS
from jaxfp8rl.errors import ConfigError

KeyPath = tuple[str, ...]


class Override(NamedTuple):
    """One `--section.key value` of the command line."""

    flag: str
    path: KeyPath
    value: Any



def parse_overrides(words: Sequence[str]) -> list[Override]:
    """The overrides among command-line words: `--optim.lr 1e-6` or `--optim.lr=1e-6`.

    A value is TOML, and a bare word is a string. An empty value makes a key absent that may be absent. Raises
    ConfigError.
    """
    out, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        if not flag.startswith("--"):
            raise ConfigError(f"{word!r}: expected --section.key value", "for example --optim.lr 1e-6")
        if not equals:
            if not rest or re.match(r"--[A-Za-z]", rest[0]):
                raise ConfigError(f"{flag}: a value is missing", f"{flag} VALUE")
            text = rest.pop(0)
        out.append(Override(flag, tuple(flag[2:].replace("-", "_").split(".")), _parse_value(flag, text)))
    return out


def _parse_value(flag: str, text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as e:
        if text.lstrip()[:1] in ('"', "'", "[", "{"):
            raise ConfigError(f"{flag}: {text} is not valid TOML: {e}",
                              'lists look like \'["a", "b"]\'') from e
        return text
    # a run may be named by its date
    is_word = len(parsed) > 1 or isinstance(parsed["value"], datetime.date | datetime.time)
    return text if is_word else parsed["value"]


def apply(override: Override, data: dict[str, Any]) -> None:
    """Write the override into the data of a TOML file. Raises ConfigError."""
    *parents, key = override.path
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{override.flag}: {parent} is a value, not a table of keys",
                              f"--{'.'.join(override.path[:-1])} VALUE")
    section = SECTIONS.get(parents[0]) if len(parents) == 1 else None
    field = section.model_fields.get(key) if section else None
    if override.value == "" and field is not None and field.default is None:
        data.pop(key, None)  # TOML has no null: an empty word stands for it
    else:
        data[key] = override.value


