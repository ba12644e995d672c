"""Sampled completions, token by token: the ratio of the learner's probability to the engine's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxfp8rl.monitors.jsonl import whole_lines
from jaxfp8rl.monitors.report.charts import number

SHOWN = 12  # completions of each run on the page
TOKENS = 6000  # maximal tokens on the page, over all runs, since tokens make it large
# A token is coloured if the ratio of the learner's to the engine's probability, or its inverse, exceeds
# these.
STEPS = (1.01, 1.1, 1.5)
_BLANK = dict.fromkeys(("step", "id", "prompt", "completion", "answer", "reward", "tokens", "finish_reason"),
                       "")


class Token(NamedTuple):
    """`level`: 0, or +-1 to +-3 as the ratio exceeds STEPS; `out`: whether the correction rejected it;
    `about`: a tooltip with the numbers, if the token is coloured or rejected."""

    text: str
    level: int
    out: bool
    about: str

    @property
    def style(self) -> str:
        """The class of the token in style.css."""
        colour = f"{'p' if self.level > 0 else 'm'}{abs(self.level)}" if self.level else ""
        return f"{colour} out" if self.out else colour


class Completion(NamedTuple):
    """One row of samples.jsonl. `tokens`: empty if the run did not keep log-probabilities; `cut`: the number
    of tokens not shown. `pieces`: the tokens, or those of each turn and observation of a trajectory, with a
    label."""

    row: dict[str, Any]
    tokens: Sequence[Token]
    cut: int
    worst: Sequence[Token]
    prompt: str
    pieces: Sequence[tuple[str, Sequence[Token]]]


def pick(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(selected rows of samples.jsonl, the number of all rows). The selection is spread evenly over the run
    and includes the row with the worst token.

    The file is read twice, row by row, because that of a long run does not fit into memory.
    """
    worst, count = (-1.0, 0), 0
    for row in _rows(path):
        worst = max(worst, (max((abs(d) for d in _log_ratios(row) if d == d), default=0.0), count))
        count += 1
    shown = min(SHOWN, count)
    wanted = {worst[1]} | {round(i * (count - 1) / max(shown - 1, 1)) for i in range(shown)}
    return [row for i, row in enumerate(_rows(path)) if i in wanted], count


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    return map(json.loads, whole_lines(path))


def prepared(rows: Sequence[dict[str, Any]], tokens: int = TOKENS) -> list[Completion]:
    """The completions to show, each cut to its share of `tokens`."""
    return [_completion(row, tokens // len(rows)) for row in rows]


def _completion(row: dict[str, Any], room: int) -> Completion:
    row = _BLANK | row
    tokens = _tokens(row)
    worst = sorted((t for t in zip(map(abs, _log_ratios(row)), range(len(tokens))) if tokens[t[1]].level),
                   reverse=True)[:5]
    shown = tokens[:room]
    return Completion(row, shown, max(0, len(tokens) - room), [tokens[i] for _, i in worst],
                      as_text(row["prompt"]), _pieces(row, shown))


def _pieces(row: dict[str, Any], tokens: Sequence[Token]) -> list[tuple[str, Sequence[Token]]]:
    """The tokens by turn, as a conversation; in one piece without a label for a completion of one turn."""
    turns = row.get("turns", ())
    if not turns or not tokens:
        return [("", tokens)]
    found, at = list[tuple[str, Sequence[Token]]](), 0
    for i, (start, end, reward) in enumerate(turns, 1):
        found += [("environment", tokens[at:start])] * (start > at)
        found.append((f"turn {i}, reward {number(reward)}", tokens[start:end]))
        at = end
    return [(label, piece) for label, piece in found if piece]


def as_text(prompt: Any) -> str:
    """A prompt as text: a chat becomes one line a message."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def _log_ratios(row: dict[str, Any]) -> list[float]:
    """old_logp - rollout_logp of each token; empty if the row lacks one of them."""
    return [float(old) - float(mu) for old, mu in zip(row.get("old_logp", ()), row.get("rollout_logp", ()))]


def _tokens(row: dict[str, Any]) -> list[Token]:
    at, found = 0, []
    ratios, weights = _log_ratios(row), row.get("weights", ())
    ours = {i for start, end, _ in row.get("turns", ()) for i in range(start, end)}
    for i, (length, mu, ratio, weight) in enumerate(zip(row.get("token_lengths", ()),
                                                        row.get("rollout_logp", ()),
                                                        ratios, weights)):
        text = row["completion"][at : at + length]
        at += length
        outside = bool(ours) and i not in ours
        found.append(Token(text, 0, False, "") if outside else _token(text, float(mu), ratio, float(weight)))
    return found


def _token(text: str, mu: float, log_ratio: float, weight: float) -> Token:
    level = 3 if math.isnan(log_ratio) else sum(abs(log_ratio) > math.log(s)
                                                for s in STEPS) * (1 if log_ratio > 0 else -1)
    out, about = weight == 0, ""
    if level or out:
        engine, learner = math.exp(min(mu, 0.0)), math.exp(
            min(mu + log_ratio, 0.0)) if log_ratio == log_ratio else math.nan
        about = f"engine {number(engine)}, learner {number(learner)}, weight {number(weight)}"
    return Token(text, level, out, about)
