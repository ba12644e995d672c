"""From the text of a completion to an answer, and from an answer to a score in [0, 1].

Everything here takes text and returns numbers. `math_verify` may loop on hostile input for longer than anyone
would wait: call it only inside the child process of `jaxfp8rl.rewards.runner`, whose clock can kill it.
"""

from __future__ import annotations

import functools
import logging
import re
import unicodedata
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Literal

from jaxfp8rl.errors import ConfigError, nearest
from jaxfp8rl.verifiers import own_scorers
from jaxfp8rl.verifiers.numbers import last_number, value

Extract = Literal["all", "tag", "last_line", "last_number", "raw"]
THINK_TAGS = ("<think>", "</think>")
SCORERS = ("exact", "math_verify")
CALLABLE = own_scorers.CALLABLE
_DELIMITED = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")  # an escaped dollar is a sum of money
_SHORT = re.compile(r"[-+]?(?:(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+|\.\d+)")  # 1e3, -.5


def extract(text: str, how: Extract, think_tags: Sequence[str] = THINK_TAGS) -> str | None:
    """The answer inside a completion, stripped; None when there is none of that form (which scores 0, not
    undefined).

    It is looked for behind the thoughts (`behind_thoughts`), but for raw: the whole text as it was written,
    thoughts and all. all: the whole text. tag: inside the last `<answer>...</answer>`. last_line: the last
    line that is not blank. last_number: the last number, in plain notation (jaxfp8rl.verifiers.numbers).
    """
    if how == "raw":
        return text
    answer = behind_thoughts(text, think_tags)
    if answer is None:
        return None
    if how == "tag":
        end = answer.rfind("</answer>")
        start = answer.rfind("<answer>", 0, max(end, 0))
        return answer[start + len("<answer>"):end].strip() if start >= 0 else None
    if how == "last_line":
        return next((line.strip() for line in reversed(answer.splitlines()) if line.strip()), None)
    return last_number(answer) if how == "last_number" else answer.strip()


def behind_thoughts(text: str, think_tags: Sequence[str]) -> str | None:
    """What follows the last closed think block; None where the last block is still open. Without tags, or a
    block: all."""
    if not think_tags:
        return text
    start, end = think_tags
    answer = text.rpartition(end)[2]
    return None if start in answer else answer


def thinks_on(prompt: str, think_tags: Sequence[str]) -> str:
    """The opening tag where a prompt ends with it, as templates of thinking models do: completions begin in a
    block. Else ""."""
    return think_tags[0] if think_tags and prompt.rstrip().endswith(think_tags[0]) else ""


def normalise(text: str) -> str:
    """NFKC, case-folded, runs of white space as one blank, one final full stop dropped."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).removesuffix(".").rstrip()


def exact_match(answer: str, candidate: str) -> float:
    """1.0 when both are the same number, or normalise to the same text, else 0.0."""
    number = value(answer)
    return float(normalise(answer) == normalise(candidate)
                 or (number is not None and number == value(candidate)))


@functools.cache
def _math_verify():
    import math_verify

    # It warns once that its own alarms are off. They are: the parent's clock stands in for them.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def _plain(text: str) -> str:
    """1e3 as 1000.0 and -.5 as -0.5, where math_verify would read 1 and nothing; what is more than a number
    as it is."""
    return f"{Decimal(repr(float(text))):f}" if _SHORT.fullmatch(text) else text


def as_latex(text: str) -> str:
    """Text that is one mathematical expression, in dollars where nothing delimits it: math_verify reads no
    bare LaTeX."""
    return text if _DELIMITED.search(text) else f"${text}$"


def math_verify(answer: str, candidate: str) -> float:
    """1.0 when the candidate's last mathematical expression equals the answer's (package math-verify), else
    0.0.

    Raises ValueError when the reference answer itself does not parse: the score is then undefined, not 0.
    """
    same = answer.strip() == candidate.strip()  # of bare LaTeX, say, it would find the numbers alone
    lib, answer, candidate = _math_verify(), _plain(answer.strip()), _plain(candidate)
    # Bare text is searched for numbers ("2x+3" would read as 3), so a reference without delimiters is given
    # as LaTeX.
    gold = lib.parse(as_latex(answer), fallback_mode="no_fallback", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the reference answer {answer!r} is no mathematical expression")
    return float(same or lib.verify(gold, lib.parse(candidate, parsing_timeout=None), timeout_seconds=None))


def check_scorer_name(name: str, built_in: Sequence[str] = SCORERS, key: str = "task.scorer") -> None:
    """Raise ConfigError unless `name` is a built-in scorer or has the form `package.module:function` or
    `file.py:function`."""
    if name not in built_in and not re.fullmatch(r"([A-Za-z_][\w.]*|.+\.py):[A-Za-z_]\w*", name):
        raise ConfigError(f'{key}: unknown scorer "{name}"{nearest(name, built_in)}',
                          'for a scorer of your own give "package.module:function", function(problem, text) -> float | None')


def load_scorer(name: str, folder: str = "") -> Callable[[Any, str], float | None]:
    """The function (problem, candidate text) -> score behind a name; imports what it needs. A module of one's
    own is looked for in `folder`, then where Python looks, and in the working directory.

    Raises ConfigError for an unknown name, a module that cannot be imported, or a function it does not have.
    """
    check_scorer_name(name)
    if name == "exact":
        return lambda problem, text: exact_match(problem.answer, text)
    if name == "math_verify":
        _math_verify()
        return lambda problem, text: math_verify(problem.answer, text)
    return own_scorers.find(name, folder)
