"""Extraction of an answer from a completion's text, and its score in [0, 1].

All functions take text and return text or numbers. `math_verify` may loop on hostile input practically
forever: call it only inside the child process of `jaxfp8rl.rewards.runner`, which kills it when its time is
up.
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
    """The answer inside a completion, stripped; None if it contains none in this form (such a completion
    scores 0, not undefined).

    All forms but "raw" search the text after the thoughts (`behind_thoughts`).

    - raw: the whole text unchanged, thoughts included
    - all: the whole text
    - tag: the contents of the last `<answer>...</answer>`
    - last_line: the last line that is not blank
    - last_number: the last number, in plain notation (jaxfp8rl.verifiers.numbers)
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
    """The text after the last closed think block; None if a think block is still open. Without tags or
    blocks, the whole text."""
    if not think_tags:
        return text
    start, end = think_tags
    answer = text.rpartition(end)[2]
    return None if start in answer else answer


def thinks_on(prompt: str, think_tags: Sequence[str]) -> str:
    """The opening tag if the prompt ends with it, as the templates of thinking models do: completions then
    begin inside a think block. Otherwise ""."""
    return think_tags[0] if think_tags and prompt.rstrip().endswith(think_tags[0]) else ""


def normalise(text: str) -> str:
    """The text in NFKC, case-folded, with each run of white space as one space, and without a final full
    stop."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).removesuffix(".").rstrip()


def exact_match(answer: str, candidate: str) -> float:
    """1.0 if both texts are the same number or normalise to the same text, otherwise 0.0."""
    number = value(answer)
    return float(normalise(answer) == normalise(candidate)
                 or (number is not None and number == value(candidate)))


@functools.cache
def _math_verify():
    import math_verify

    # It warns that its own time-outs are off. They are off on purpose: the parent process enforces one.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


def _plain(text: str) -> str:
    """1e3 as 1000.0 and -.5 as -0.5, because math_verify reads 1 in the first and nothing in the second. Any
    other text unchanged."""
    return f"{Decimal(repr(float(text))):f}" if _SHORT.fullmatch(text) else text


def as_latex(text: str) -> str:
    """A text that is one mathematical expression, in dollar signs unless it has delimiters: math_verify does
    not read bare LaTeX."""
    return text if _DELIMITED.search(text) else f"${text}$"


def math_verify(answer: str, candidate: str) -> float:
    """1.0 if the last mathematical expression of the candidate equals the answer (package math-verify),
    otherwise 0.0.

    Raises ValueError if the reference answer itself does not parse; the score is then undefined, not 0.
    """
    # math_verify finds only the numbers in bare LaTeX, for example, so equal texts are equal without it.
    same = answer.strip() == candidate.strip()
    lib, answer, candidate = _math_verify(), _plain(answer.strip()), _plain(candidate)
    # math_verify searches bare text for numbers (3 in "2x+3"), so a reference without delimiters is passed as
    # LaTeX.
    gold = lib.parse(as_latex(answer), fallback_mode="no_fallback", parsing_timeout=None)
    if not gold:
        raise ValueError(f"the reference answer {answer!r} is not a mathematical expression")
    return float(same or lib.verify(gold, lib.parse(candidate, parsing_timeout=None), timeout_seconds=None))


def check_scorer_name(name: str, built_in: Sequence[str] = SCORERS, key: str = "task.scorer") -> None:
    """Raise ConfigError unless `name` is a built-in scorer or has the form `package.module:function` or
    `file.py:function`."""
    if name not in built_in and not re.fullmatch(r"([A-Za-z_][\w.]*|.+\.py):[A-Za-z_]\w*", name):
        raise ConfigError(f'{key}: unknown scorer "{name}"{nearest(name, built_in)}',
                          'for your own scorer give "package.module:function", '
                          "function(problem, text) -> float | None")


def load_scorer(name: str, folder: str = "") -> Callable[[Any, str], float | None]:
    """The function (problem, candidate text) -> score under a name. Imports the packages that it needs. A
    user's module is searched for in `folder`, then on Python's path, then in the working directory.

    Raises ConfigError for an unknown name, a module that cannot be imported, or a missing function.
    """
    check_scorer_name(name)
    if name == "exact":
        return lambda problem, text: exact_match(problem.answer, text)
    if name == "math_verify":
        _math_verify()
        return lambda problem, text: math_verify(problem.answer, text)
    return own_scorers.find(name, folder)
