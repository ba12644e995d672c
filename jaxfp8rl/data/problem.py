"""A problem: a prompt and its reference answer."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxfp8rl.data.messages import Prompt


@dataclasses.dataclass(frozen=True)
class Problem:
    """A prompt (plain text, or chat messages of `role` and `content`) and its reference answer. `meta` is
    JSON-able.

    `alternatives`: other answers that are as right. `reference`: the text that the answer was found in (a
    worked solution, say), where it is more than the answer. `question`: two problems that have it in common
    are one to a split, however they are put; by default what stands in the prompt (jaxfp8rl.data.seen).
    """

    id: str
    prompt: Prompt
    answer: str
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    alternatives: tuple[str, ...] = ()
    reference: str = ""
    question: str = ""

    @property
    def answers(self) -> tuple[str, ...]:
        """Every accepted answer, the usual one first."""
        return (self.answer, *self.alternatives)
