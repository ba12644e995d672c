"""Rules: settings that a config may not have together.

A rule is a function of the whole config that raises ConfigError. Most are a `Rule`, a condition with a
message and a next step. Rules stand in tuples behind the sections that they are about, and
`jaxfp8rl.config.rules` puts the tuples in the order in which they are checked:

    LENGTHS = (
        Rule(lambda c: c.loss.overlong_buffer > c.rollout.max_new_tokens,
             "loss.overlong_buffer = {loss.overlong_buffer} exceeds rollout.max_new_tokens",
             "set it to {rollout.max_new_tokens} at most"),
        no_effect("loss.overlong_penalty", when=lambda c: not c.loss.overlong_buffer,
                  under="loss.overlong_buffer = 0", instead="loss.overlong_buffer"),
    )

In a text, "{loss.kl}" stands for the value of that setting and "{config.updates}" for a property of the
config. A config is `Any` here: the class imports the sections, which import this module.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable
from typing import Any

from jaxfp8rl.errors import ConfigError

Check = Callable[[Any], object]  # raises ConfigError
Condition = Callable[[Any], object]  # true or false


@dataclasses.dataclass(frozen=True)
class Rule:
    """Refuses a config of which `broken` is true."""

    broken: Condition
    message: str
    next_step: str = ""

    def __call__(self, cfg: Any) -> None:
        if self.broken(cfg):
            raise ConfigError(filled(self.message, cfg), filled(self.next_step, cfg))


def excludes(setting: str, given: Condition, *rules: Rule) -> tuple[Rule, ...]:
    """`rules` for configs that have `given`. Each message begins with the `setting` that asks for them."""
    both = lambda rule: lambda c: given(c) and rule.broken(c)
    return tuple(Rule(both(rule), f"{setting}: {rule.message}", rule.next_step) for rule in rules)


def no_effect(*keys: str, when: Condition, under: str, instead: str) -> Check:
    """Refuse those of `keys` that are not their defaults `when` nothing would read them.

    under: the setting that makes them idle. instead: the setting under which they count.
    """
    def check(cfg: Any) -> None:
        if not (when(cfg) and (found := changed(cfg, keys))):
            return
        verb, them = ("has", "it") if len(found) == 1 else ("have", "them")
        defaults = " ".join(f"--{key}={_word(default)}" for key, default in found.items())
        raise ConfigError(f"{', '.join(found)} {verb} no effect with {filled(under, cfg)}",
                          f"leave {them} out ({defaults}), or set {filled(instead, cfg)}")

    return check


def about(key: str, check: Check) -> Check:
    """`check`, with the key in front of what it says."""
    def named(cfg: Any) -> None:
        try:
            check(cfg)
        except ConfigError as e:
            raise ConfigError(f"{key}: {e.message}", e.next_step) from e

    return named


def changed(cfg: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    """Those of the keys, "section.key", whose values are not their defaults, with the defaults."""
    found = {}
    for name in keys:
        section, _, key = name.partition(".")
        values = getattr(cfg, section)
        default = type(values).model_fields[key].default
        if dict(values)[key] != default:  # no attribute is asked for: a test notes which ones a run reads
            found[name] = default
    return found


def filled(text: str, cfg: Any) -> str:
    """The text with the values of the settings that it names in braces."""
    return _Values().vformat(text, (), {**dict(cfg), "config": cfg})


class _Values(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return super().format_field(list(value) if isinstance(value, tuple) else value, format_spec)


def _word(value: object) -> str:
    """A value as a word of the command line. An empty word stands for an absent value."""
    value = list(value) if isinstance(value, tuple) else value
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
