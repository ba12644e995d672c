"""Whether a run's metrics warn before its reward falls: the rules of `jaxfp8rl.health`, asked after every
step of the cells of an experiment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxfp8rl.experiments.results import FIELDS, Result
from jaxfp8rl.health.courses import fall
from jaxfp8rl.health.judges import Level, Records, Rule
from jaxfp8rl.health.table import RULES

REWARDS = {"reward/mean": "reward", "eval/reward_mean": "held-out reward"}
ALARMS = tuple(rule for rule in RULES if rule.key in FIELDS and not rule.key.startswith(("reward/", "eval/")))


class Alarm(NamedTuple):
    """What a rule said of cells whose reward fell and of cells whose reward did not.

    ahead: of each cell that fell, by how many steps the rule was ill before the fall; negative if later, None
    if never. without: the cells that held in which it was ill. held: all cells that held.
    """

    rule: Rule
    ahead: tuple[int | None, ...]
    without: int
    held: int

    @property
    def before(self) -> list[int]:
        """The steps of the cells in which it spoke before the fall."""
        return [steps for steps in self.ahead if steps is not None and steps > 0]


def fell_at(records: Records) -> int | None:
    """The step from which on the training or the held-out reward lay 50% below its best, until the end, as
    docs/health.md judges it; the earlier of the two. None if neither fell.

    A training reward can hide a fall: some problems are too easy, or completions are of earlier versions.
    """
    found = [_fell_at(records, key) for key in REWARDS]
    return min((step for step in found if step is not None), default=None)


def _fell_at(records: Records, key: str) -> int | None:
    find, last = fall(key, REWARDS[key]), None
    for n in range(len(records), 0, -1):
        found = find(records[:n])
        if not found or found[0] != Level.ILL:
            break
        last = int(records[n - 1]["step"])
    return last


def spoke_at(rule: Rule, records: Records) -> int | None:
    """The first step after which the rule, asked about the steps so far, says ill."""
    for n in range(1, len(records) + 1):
        found = rule.judge(records[:n])
        if found and found.level == Level.ILL:
            return int(records[n - 1]["step"])
    return None


def alarms(results: Sequence[Result]) -> list[Alarm]:
    """Every rule of ALARMS, judged by the cells; [] if no reward fell."""
    cells = [[step for step in r.steps if step["step"] > 0] for r in results]
    falls = [(records, fell_at(r.steps)) for records, r in zip(cells, results)]
    if not any(fallen for _, fallen in falls):
        return []
    found = []
    for rule in ALARMS:
        if not any(rule.key in record for records in cells for record in records):
            continue
        ahead, without = [], 0
        for records, fallen in falls:
            spoke = spoke_at(rule, records)
            if fallen is None:
                without += spoke is not None
            else:
                ahead.append(None if spoke is None else fallen - spoke)
        found.append(Alarm(rule, tuple(ahead), without, len(cells) - len(ahead)))
    return found
