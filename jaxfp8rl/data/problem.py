"""A problem: a prompt and its reference answer."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxfp8rl.data.messages import Prompt


@dataclasses.dataclass(frozen=True)
class Problem:
    """A prompt (plain text, or chat messages with `role` and `content`) and its reference answer.

    meta: values that JSON can represent. alternatives: other accepted answers. reference: the text that
    contains the answer, such as a worked solution, if it is more than the answer. question: the identity of
    the problem for splits; problems with equal questions are never split between training and held-out sets.
    The default is the text of the prompt (jaxfp8rl.data.seen).
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
