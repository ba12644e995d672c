"""Kept completions, a token at a time: how far the learner's probability of it lies from the engine's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxfp8rl.monitors.jsonl import whole_lines
from jaxfp8rl.monitors.report.charts import number

SHOWN = 12  # completions of a run
TOKENS = 6000  # of all runs' completions together: what makes a page large
# The learner's probability over the engine's, beyond which a token is coloured; of the inverse likewise.
STEPS = (1.01, 1.1, 1.5)
_BLANK = dict.fromkeys(("step", "id", "prompt", "completion", "answer", "reward", "tokens", "finish_reason"),
                       "")


class Token(NamedTuple):
    """`level`: 0, or +-1 to +-3 as the ratio passes STEPS; `out`: left out by the correction; `about`: the
    numbers in words, for a token that is one or the other."""

    text: str
    level: int
    out: bool
    about: str

    @property
    def style(self) -> str:
        """Its class in style.css."""
        colour = f"{'p' if self.level > 0 else 'm'}{abs(self.level)}" if self.level else ""
        return f"{colour} out" if self.out else colour


class Completion(NamedTuple):
    """One row of samples.jsonl. `tokens`: none where the run did not keep log-probabilities; `cut`: tokens
    not shown."""

    row: dict[str, Any]
    tokens: Sequence[Token]
    cut: int
    worst: Sequence[Token]
    prompt: str


def pick(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(some rows of samples.jsonl, how many there are): rows spread evenly over the run, and the one whose
    worst token is the worst of all. The file is read twice, a row at a time: a long run's does not fit into
    memory."""
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
    """`rows` as they are shown, each up to its share of `tokens`."""
    return [_completion(row, tokens // len(rows)) for row in rows]


def _completion(row: dict[str, Any], room: int) -> Completion:
    row = _BLANK | row
    tokens = _tokens(row)
    worst = sorted((t for t in zip(map(abs, _log_ratios(row)), range(len(tokens))) if tokens[t[1]].level),
                   reverse=True)[:5]
    return Completion(row, tokens[:room], max(0, len(tokens) - room), [tokens[i] for _, i in worst],
                      as_text(row["prompt"]))


def as_text(prompt: Any) -> str:
    """Text, or a chat's messages one under another."""
    return prompt if isinstance(prompt, str) else "\n".join(f"{m['role']}: {m['content']}" for m in prompt)


def _log_ratios(row: dict[str, Any]) -> list[float]:
    """old_logp - rollout_logp of each token; none where the row does not have both."""
    return [float(old) - float(mu) for old, mu in zip(row.get("old_logp", ()), row.get("rollout_logp", ()))]


def _tokens(row: dict[str, Any]) -> list[Token]:
    at, found = 0, []
    ratios, weights = _log_ratios(row), row.get("weights", ())
    for length, mu, ratio, weight in zip(row.get("token_lengths", ()), row.get("rollout_logp", ()), ratios,
                                         weights):
        text = row["completion"][at : at + length]
        at += length
        found.append(_token(text, float(mu), ratio, float(weight)))
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
