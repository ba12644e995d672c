"""The healthy ranges of a run's metrics, in one table: console, notes, summary, report and docs all read
RULES.

`verdict` judges a whole run by all of them, in one line. docs/health.md is the table as a page, which a test
compares (`python -m jaxfp8rl.health.table` prints it anew).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxfp8rl.health import courses
from jaxfp8rl.health.courses import (
    ENTROPY_FLOOR,
    ENTROPY_RISE,
    FALL,
    SPIKE,
    TEACHING,
    WINDOW,
    completions,
    share_of,
)
from jaxfp8rl.health.judges import OFTEN, Bound, Course, Fault, Finding, Level, Records, Rule, is_number

SHOWN = 3  # findings that the line names
STYLES = {Level.HEALTHY: "green", Level.WARNING: "yellow", Level.ILL: "bold red"}

ENGINE = (
    "compare both sides' weights, formats and temperature, beginning with the start-up gate's gap; a mismatch that rises: stale "
    "weights, scales or caches"
)
RULES: tuple[Rule, ...] = (
    Bound(
        "mismatch/token_mult_prob_error", "mismatch", 1.05, 1.1, ENGINE,
        "NeMo RL: its nightly runs want a median below 1.05 in BF16 and 1.1 in FP8, and in FP8 at most 10% of the steps above "
        "1.1; it leaves out a sequence above 2", never=2,
    ),
    Bound(
        "mismatch/k3", "mismatch k3", 3e-3, 1e-2, ENGINE,
        "NeMo RL: below 1e-3 is good, below 3e-3 in FP8 from end to end; verl rejects a sequence above 1e-2",
        once=False,
    ),
    Bound(
        "correction/ess", "effective sample size", 0.5, 0.3,
        "a milder weight (docs/corrections.md#which-to-choose); where `correction/raw_ess` alone is low, see the mismatch",
        "verl's docs: above 0.5 is good, below 0.3 a warning", above=False,
    ),
    Bound(
        "correction/weight_mean", "mean weight", 2, 2,
        "the engine samples from another policy than the learner scores: see the mismatch",
        "verl's docs: outside 0.5 to 2 something is broken",
    ),
    Bound("correction/weight_mean", "mean weight", 0.5, 0.5, "as above 2", "as above 2", above=False),
    Bound(
        "correction/truncated_fraction", "truncated tokens", 0.01, 0.1,
        "find the mismatch's cause before you raise the cap",
        "IcePop's authors: 1 to 2 per mille of the tokens lie outside its bounds",
    ),
    Bound(
        "correction/rejected_fraction", "rejected tokens", 0.05, 0.3,
        "bounds that fit length and mismatch (docs/corrections.md#the-laboratory), or another correction",
        "this project's laboratory: a few percent. Where a third is left out, the rest is no sample of the policy",
    ),
    Bound(
        "clip/fraction", "clipped tokens", 0.2, 0.5,
        "fewer updates a step, a lower `optim.lr`, or wider clip distances",
        "PPO and DAPO clip a few percent, GSPO 15% (2507.18071)",
    ),
    Bound(
        "response/cut_fraction", "cut completions", 0.1, 0.5,
        "raise `rollout.max_new_tokens`; or `loss.mask_cut`, `loss.overlong_buffer`",
        "DAPO (2503.14476), section 3.4: the reward of a cut completion is noise",
    ),
    Course(
        "reward/mean", "reward", "not all 0", f"all 0 in more than {OFTEN:.0%} of the steps",
        "all 0 in more than half of the steps, or at the end; not finite", courses.zeros,
        "the note of the first such step shows a prompt, a completion and the answer: look at the extraction and the scorer; or "
        "take easier problems, a warm start", "without a reward there is no gradient",
    ),
    Course(
        "reward/mean", "reward", "not falling", f"a loss of {FALL[0]:.0%} of its best at the end",
        f"a loss of {FALL[1]:.0%}",
        courses.fall("reward/mean", "reward"),
        "go back: `--fork RUN@STEP`, with a lower `optim.lr` or a stronger correction",
        "collapses in Jet-RL (2601.14243) and FP16 (2510.26788)",
    ),
    Course(
        "eval/reward_mean", "held-out reward", "not falling",
        f"a loss of {FALL[0]:.0%} of its best at the end",
        f"a loss of {FALL[1]:.0%}", courses.fall("eval/reward_mean", "held-out reward"),
        "go back to the checkpoint of the best evaluation: `--fork RUN@STEP`",
        "as `reward/mean`, on problems that the run did not train on",
    ),
    Course(
        "reward/groups_solved_in_part", "groups that teach", f"above {TEACHING:g}",
        f"0 in more than {OFTEN:.0%} of the steps; below {TEACHING:g} in the median",
        "0 in more than half of the steps, or at the end", courses.alike,
        "problems that are neither too easy nor too hard; more `rollout.samples_per_prompt`; `loss.dynamic_sampling_rounds`",
        "DAPO (2503.14476), section 3.2: a group of equal rewards has no gradient. A level milder where the reward has risen",
    ),
    Fault(
        "reward/undefined", "completions had no score", "0", lambda value, r: share_of(value, completions(r)),
        "score one by hand (docs/tasks.md); `task.reward_timeout_s`",
        "nothing is known of a completion without a score",
    ),
    Fault(
        "eval/undefined", "held-out completions had no score", "0",
        lambda value, r: share_of(value, r.get("eval/problems", 0)),
        "as `reward/undefined`", "they count as failed",
    ),
    Fault(
        "rollout/groups_rejected", "groups of completions could not be learned from", "0",
        lambda value, r: share_of(value, value + r.get("rollout/groups_chosen", float("inf"))),
        "look at the engine's log", "an engine without log-probabilities is broken",
    ),
    Fault(
        "update/applied", "an update was not applied", "1",
        lambda value, r: max(0.0, 1 - value - r.get("update/overflow", 0)),
        "the note of that step says why", "what is not finite, or has nothing to learn from, is left out",
    ),
    Fault(
        "update/overflow", "gradients overflowed the loss scale", "rare", lambda value, r: value,
        'the scale finds its height in some steps; if it does not: `precision.compute_dtype = "bfloat16"`',
        "mixed precision training (1710.03740)", any=False,
    ),
    Fault(
        "loss", "the loss was not finite", "finite", lambda value, r: 0,
        "lower `optim.lr`; look at bad_batch.safetensors",
        "such an update is not applied", often=0,
    ),
    Course(
        "grad_norm", "gradient norm", f"below {SPIKE[0]} times the median of the {WINDOW} steps before it",
        f"above {SPIKE[0]} times",
        f"above {SPIKE[1]} times; above {SPIKE[0]} times in more than {OFTEN:.0%} of the steps; not finite",
        courses.gradients,
        "lower `optim.lr` or `optim.clip_norm`; look at the mismatch of that step",
        "it moves before reward and KL do (IcePop)",
    ),
    Course(
        "entropy", "entropy", "steady",
        f"a fifth of its beginning; {ENTROPY_RISE[0]} times it, and 0.5 nats above",
        f"below {ENTROPY_FLOOR:g} nats; a twentieth; {ENTROPY_RISE[1]} times, and 1 nat above",
        courses.entropy,
        "a fall: a wider `loss.clip_high`, `loss.entropy_coef`; a rise in FP8: `loss.calibrate_clip_every`",
        "the fall: DAPO (2503.14476); the rise: calibrated clipping (2609.22870). A level milder where the reward has risen",
    ),
    Fault(
        "engine/healthy", "the engine was not healthy", "1", lambda value, r: max(0.0, 1 - value),
        "look at the engine's log",
        "its own word",
    ),
    Course(
        "engine/restarts", "restarts", "0", "any", f"in more than {OFTEN:.0%} of the steps", courses.restarts,
        "look at the engine's log", "what ended it does so again",
    ),
)


class Verdict(NamedTuple):
    """`level`: the worst finding's; None where there is no step to judge. The worst findings are first."""

    level: Level | None
    findings: tuple[Finding, ...] = ()

    @property
    def word(self) -> str:
        return "unknown" if self.level is None else str(self.level)

    @property
    def line(self) -> str:
        """For example "healthy", or "ill: mismatch 1.15 in the median, 20.8 at step 41 (healthy below
        1.05)"."""
        if self.level is None:
            return "unknown: no step was taken"
        said = [f.text for f in self.findings[:SHOWN]]
        said += [f"and {more} more"] if (more := len(self.findings) - SHOWN) > 0 else []
        return ": ".join([self.word, *(["; ".join(said)] if said else [])])


def verdict(records: Records) -> Verdict:
    """Of a run's records, metrics.jsonl, with numbers that are not finite as floats."""
    judged = {rule.key for rule in RULES if not rule.key.startswith("eval/")}
    if not any(is_number(r.get(key)) for r in records for key in judged):
        return Verdict(None)
    findings = [found for rule in RULES if (found := rule.judge(records))]
    findings.sort(key=lambda f: -f.level)
    return Verdict(findings[0].level if findings else Level.HEALTHY, tuple(findings))


def level_of(key: str, value: float) -> Level | None:
    """Of one step's value; None for a metric without bounds."""
    return max((rule.level_of(value) for rule in RULES if isinstance(rule, Bound) and rule.key == key),
               default=None)


class Watch:
    """Says of each metric when it is ill in a step for the first time."""

    def __init__(self):
        self._said: set[str] = set()

    def notes(self, record: Mapping[str, Any]) -> list[str]:
        found = []
        for rule in RULES:
            value: Any = record.get(rule.key)
            if not (isinstance(rule, Bound) and rule.once and is_number(value)) or rule.key in self._said:
                continue
            if rule.level_of(value) == Level.ILL:
                self._said.add(rule.key)
                found.append(
                    f"step {record['step']}: {rule.name} {rule.show(value)} (healthy {rule.healthy}); {rule.remedy}")
        return found


def ranges(key: str) -> str:
    """The healthy range of a metric in words; "" where it has none."""
    return ", ".join(rule.healthy for rule in RULES if rule.key == key)


def table() -> str:
    """RULES as the Markdown table of docs/health.md."""
    rows = [(f"`{r.key}`", r.healthy, r.warning, r.ill, r.remedy, r.source) for r in RULES]
    head = "| metric | healthy | warning | ill | what to do | source |\n|---|---|---|---|---|---|\n"
    linked = lambda text: re.sub(r"docs/([\w.#-]+)", r"[\1](\1)", text)
    return head + "".join(f"| {' | '.join(map(linked, row))} |\n" for row in rows)


if __name__ == "__main__":
    print(table(), end="")
