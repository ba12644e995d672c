"""The section [curriculum]: which problems are drawn more often, and its rules (docs/turns.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from jaxfp8rl.config.rule import Rule, no_effect
from jaxfp8rl.config.section import Section


class Curriculum(Section):
    """Problems drawn by what was solved lately (docs/turns.md)."""

    by: Literal["none", "problem", "environment"] = Field(
        default="none",
        description="draw more often the problems, or the environments of several, that were lately solved "
                    "neither always nor never. none: draw all alike")
    solved_at: float = Field(
        default=1.0, allow_inf_nan=False, description="least reward that counts as solved")
    pace: float = Field(
        default=0.5, gt=0, le=1,
        description="weight of a step's solve rate in the recent solve rate, which begins at 1/2")
    floor: float = Field(
        default=0.1, ge=0.001, le=1,
        description="how often a problem that is always or never solved is drawn, against one that is solved"
                    " half of the time")


CURRICULUM = (
    Rule(lambda c: c.curriculum.by == "environment" and not (
        c.task.kind == "environment" and c.task.name == "several"),
         'curriculum.by = "environment" needs several environments',
         'set task.kind = "environment" and task.name = "several", or curriculum.by = "problem"'),
    no_effect("curriculum.solved_at", "curriculum.pace", "curriculum.floor",
              when=lambda c: c.curriculum.by == "none", under='curriculum.by = "none"',
              instead="curriculum.by"),
)
