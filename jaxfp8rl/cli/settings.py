"""`jaxfp8rl config`: list the settings with type, limits, default and description, search them, and compare
configs."""

from __future__ import annotations

import difflib
import functools
import itertools
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import pydantic

from jaxfp8rl import other_names
from jaxfp8rl.config.resume_rules import changes, described
from jaxfp8rl.config.schema import SECTIONS, Config
from jaxfp8rl.config.toml import presets, to_toml
from jaxfp8rl.errors import ConfigError
from jaxfp8rl.other_names import plain

SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
KINDS = {str: "text", int: "integer", float: "number", bool: "true or false"}
WIDTH = 110


class Setting(NamedTuple):
    """One key of a section. `default` is in TOML syntax, "" if the key is absent by default, and None if it
    is required."""

    section: str
    key: str
    kind: str
    default: str | None
    description: str
    choices: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"

    def __str__(self) -> str:
        default = "required" if self.default is None else f"default {self.default or 'absent'}"
        return "\n".join([f"  --{self.name}  {self.kind}; {default}",
                          *textwrap.wrap(self.description, WIDTH, initial_indent=" " * 6,
                                         subsequent_indent=" " * 6)])


@functools.cache
def settings() -> tuple[Setting, ...]:
    """All settings, in the order of a config file."""
    return tuple(
        Setting(section, key, _kind(field), _default(field), field.description or "",
                _choices(field.annotation))
        for section, model in SECTIONS.items() for key, field in model.model_fields.items()
    )


def describe(found: Iterable[Setting]) -> str:
    """The settings `found`, by section, as text for the terminal."""
    by_section: dict[str, list[str]] = {}
    for s in found:
        by_section.setdefault(s.section,
                              [f"[{s.section}]  {SECTIONS[s.section].headline()}"]).append(str(s))
    return "\n\n".join("\n".join(lines) for lines in by_section.values())


def find(*words: str) -> list[Setting]:
    """The settings whose name, choices or description contain all `words`.

    Whole words are preferred to parts of words, and names come before descriptions. For another framework's
    name of a setting, its counterparts here come first. Raises ConfigError, with the nearest setting, if none
    matches.
    """
    everything, query = settings(), " ".join(words)
    words = tuple(plain(word) for word in query.split())
    meant = re.findall(r"\w+\.\w+", " ".join(other_names.here("_".join(words))))
    theirs = [s for s in everything if s.name in meant]
    whole = _matching([rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])" for word in words], everything)
    found = theirs + [s for s in whole
                      if s not in theirs] or _matching(list(map(re.escape, words)), everything)
    if not found:
        near = next((hit for word in words for hit in _nearest(word, everything)), "")
        way_on = f"jaxfp8rl config --find {near}" if near else "`jaxfp8rl config` lists them all"
        raise ConfigError(f"no setting matches {query!r}",
                          "docs/metrics.md explains the metrics" if "/" in query else way_on)
    return found


def _matching(patterns: list[str], everything: Sequence[Setting]) -> list[Setting]:
    """The settings whose name matches all patterns, then those whose name and description together do. An
    underscore also matches a space, or nothing: `plain` puts one into the names of classes."""
    spaced = [re.compile(pattern.replace("_", "[_ ]?")) for pattern in patterns]
    have = lambda text: all(pattern.search(text.lower()) for pattern in spaced)
    named = sorted((s for s in everything if have(s.name)), key=lambda s: not spaced[0].fullmatch(s.key))
    return named + [s for s in everything if s not in named and have(f"{s.name} {s.kind} {s.description}")]


def _nearest(word: str, everything: Sequence[Setting]) -> list[str]:
    return difflib.get_close_matches(word, [*(s.key for s in everything), *other_names.names()], 1, 0.6)


def format_differences(a: Config, b: Config) -> str:
    """One line for each setting in which two configs differ, with both values in TOML syntax."""
    return "\n".join(described(changes(a, b))) or "no setting differs"


def format_presets() -> str:
    """The shipped configs, each with its opening comment."""
    heads = {name: itertools.takewhile(lambda line: line.startswith("#"),
                                       file.read_text(encoding="utf-8").splitlines())
             for name, file in sorted(presets().items())}
    return "\n\n".join("\n".join([name, *(f"  {line.lstrip('# ')}" for line in head)])
                       for name, head in heads.items())


@functools.cache
def overview() -> str:
    """The keys of each section, for `--help`."""
    keys = {name: ", ".join(s.key for s in settings() if s.section == name) for name in SECTIONS}
    return "\n".join(textwrap.fill(f"  {name:9} {listed}", WIDTH, subsequent_indent=" " * 12)
                     for name, listed in keys.items())


def _kind(field: pydantic.fields.FieldInfo) -> str:
    """The type and limits of a setting in words, or its choices."""
    limits = [f"{sign} {getattr(m, name):g}" for m in field.metadata for name, sign in SIGNS.items()
              if hasattr(m, name)]
    return ", ".join([_type(field.annotation), *limits])


def _type(annotation: Any) -> str:
    if choices := _choices(annotation):
        return " | ".join(choice or '""' for choice in choices)
    if annotation == float | Literal["auto"] | None:
        return "number, > 0, or auto"
    if typing.get_origin(annotation) is tuple:
        return f"list of {_type(typing.get_args(annotation)[0])}"
    if typing.get_origin(annotation) is typing.Annotated:
        return _type(typing.get_args(annotation)[0])
    if annotation == int | str:
        return "ids or texts"
    return KINDS.get(_present(annotation), "table")


def _choices(annotation: Any) -> tuple[str, ...]:
    annotation = _present(annotation)
    return tuple(map(str, typing.get_args(annotation))) if typing.get_origin(annotation) is Literal else ()


def _present(annotation: Any) -> Any:
    """X of an optional type X | None; any other type itself."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    return typing.get_args(annotation)[0] if is_union else annotation


def _default(field: pydantic.fields.FieldInfo) -> str | None:
    if field.is_required():
        return None
    return "" if field.default is None else to_toml(field.default)
