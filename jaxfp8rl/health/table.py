"""The healthy ranges of a run's metrics, in one table: console, notes, summary, report and docs all read
RULES.

`verdict` judges a whole run by all of them, in one line. docs/health.md contains the same table, and a test
compares the two; `python -m jaxfp8rl.health.table` prints it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxfp8rl.health import courses
from jaxfp8rl.health.courses import (
    CONSTANT,
    ENTROPY_FLOOR,
    ENTROPY_RISE,
    FALL,
    FEW,
    SPIKE,
    TEACHING,
    WINDOW,
    completions,
    share_of,
)
from jaxfp8rl.health.judges import (
    NOISE,
    OFTEN,
    Bound,
    Course,
    Fault,
    Finding,
    Level,
    Records,
    Rule,
    has_noise,
    is_number,
)

SHOWN = 3  # the number of findings that a verdict's line names
STYLES = {Level.HEALTHY: "green", Level.WARNING: "yellow", Level.ILL: "bold red"}

ENGINE = (
    "compare weights, formats and temperature of learner and engine, starting with the start-up gate's gap; "
    "a mismatch that grows points to stale weights, scales or caches"
)
RULES: tuple[Rule, ...] = (
    Bound(
        "mismatch/token_mult_prob_error", "mismatch", 1.05, 1.1, ENGINE,
        "NeMo RL: its nightly runs require a median below 1.05 in BF16 and 1.1 in FP8, and in FP8 at most "
        "10% of the steps above 1.1; it masks sequences above 2", never=2, by_noise=True,
    ),
    Bound(
        "mismatch/k3", "mismatch k3", 3e-3, 1e-2, ENGINE,
        "NeMo RL: good below 1e-3, and below 3e-3 in end-to-end FP8; verl rejects a sequence above 1e-2",
        once=False, by_noise=True,
    ),
    Bound(
        "correction/ess", "effective sample size", 0.5, 0.3,
        "use a milder weight (docs/corrections.md#which-to-choose); if only `correction/raw_ess` is low, "
        "look at the mismatch",
        "verl's docs: above 0.5 is good, below 0.3 is a warning", above=False,
    ),
    Bound(
        "correction/weight_mean", "mean weight", 2, 2,
        "the engine samples from a different policy than the learner scores: look at the mismatch",
        "verl's docs: outside 0.5 to 2 something is broken",
    ),
    Bound(
        "correction/weight_mean", "mean weight", 0.5, 0.5, "as for the bound 2", "as for the bound 2",
        above=False,
    ),
    Bound(
        "correction/truncated_fraction", "truncated weights", 0.01, 0.1,
        "find the cause of the mismatch before you raise the cap",
        "IcePop's authors: 0.1% to 0.2% of the tokens lie outside its bounds",
    ),
    Bound(
        "correction/rejected_fraction", "rejected tokens", 0.05, 0.3,
        "choose bounds that fit the length and the mismatch (docs/corrections.md#the-laboratory), or another "
        "correction",
        "this project's laboratory: a few percent. Without a third of the tokens, the rest no longer "
        "represents the policy",
    ),
    Bound(
        "clip/fraction", "clipped tokens", 0.2, 0.5,
        "take fewer updates a step, lower `optim.lr`, or widen the clip range",
        "PPO and DAPO clip a few percent, GSPO 15% (2507.18071)",
    ),
    Bound(
        "response/cut_fraction", "cut completions", 0.1, 0.5,
        "raise `rollout.max_new_tokens`, or set `loss.mask_cut` or `loss.overlong_buffer`",
        "DAPO (2503.14476), section 3.4: the reward of a cut completion is noise",
    ),
    Course(
        "reward/mean", "reward", "not all 0", f"all 0 in more than {OFTEN:.0%} of the steps",
        "all 0 in more than half of the steps, or at the end; not finite", courses.zeros,
        "the note of the first such step shows a prompt, a completion and the answer: check the extraction "
        "and the scorer; otherwise use easier problems or "
        "a warm start", "without a reward there is no gradient",
    ),
    Course(
        "reward/mean", "reward", "not falling", f"ends {FALL[0]:.0%} below its best",
        f"ends {FALL[1]:.0%} below its best",
        courses.fall("reward/mean", "reward"),
        "go back: `--fork RUN@STEP`, with a lower `optim.lr` or a stronger correction",
        "collapses in Jet-RL (2601.14243) and FP16 (2510.26788)",
    ),
    Course(
        "eval/reward_mean", "held-out reward", "not falling",
        f"ends {FALL[0]:.0%} below its best",
        f"ends {FALL[1]:.0%} below its best", courses.fall("eval/reward_mean", "held-out reward"),
        "go back to the checkpoint of the best evaluation: `--fork RUN@STEP`",
        "as `reward/mean`, on problems that the run did not train on",
    ),
    Course(
        "eval/commonest_share", "commonest completion", f"below {CONSTANT[0]:g}",
        f"above {CONSTANT[0]:g} at the end, of at least {FEW} problems", f"above {CONSTANT[1]:g} at the end",
        courses.constant,
        "count the answers of the dataset: choose problems, or a reward, for which one answer to all does "
        "not pay",
        "`experiments/smollm2_letters.toml`: every seed of every recipe came to answer 1, right for 56%",
    ),
    Course(
        "reward/groups_solved_in_part", "groups with a gradient", f"above {TEACHING:g}",
        f"0 in more than {OFTEN:.0%} of the steps; below {TEACHING:g} in the median",
        "0 in more than half of the steps, or at the end", courses.alike,
        "use problems that are neither too easy nor too hard, raise `rollout.samples_per_prompt`, or set "
        "`loss.dynamic_sampling_rounds`",
        "DAPO (2503.14476), section 3.2: a group of equal rewards has no gradient. One level milder if the "
        "reward rose",
    ),
    Fault(
        "reward/undefined", "completions had no score", "0", lambda value, r: share_of(value, completions(r)),
        "score one by hand (docs/tasks.md), or raise `task.reward_timeout_s`",
        "a completion without a score is unknown, not wrong",
    ),
    Fault(
        "eval/undefined", "held-out completions had no score", "0",
        lambda value, r: share_of(value, r.get("eval/problems", 0)),
        "as for `reward/undefined`", "they count as failed",
    ),
    Fault(
        "rollout/groups_rejected", "groups of completions were unusable", "0",
        lambda value, r: share_of(value, value + r.get("rollout/groups_chosen", float("inf"))),
        "look at the engine's log", "an engine without log-probabilities is broken",
    ),
    Fault(
        "update/applied", "an update was not applied", "1",
        lambda value, r: max(0.0, 1 - value - r.get("update/overflow", 0)),
        "the note of that step says why", "an update that is not finite, or has no live token, is skipped",
    ),
    Fault(
        "update/overflow", "gradients overflowed the loss scale", "rare", lambda value, r: value,
        'the scale adapts within some steps; if it does not, set `precision.compute_dtype = "bfloat16"`',
        "mixed precision training (1710.03740)", any=False,
    ),
    Fault(
        "loss", "the loss was not finite", "finite", lambda value, r: 0,
        "lower `optim.lr`, and inspect bad_batch.safetensors",
        "such an update is not applied", often=0,
    ),
    Course(
        "grad_norm", "gradient norm", f"below {SPIKE[0]} times the median of the {WINDOW} steps before it",
        f"above {SPIKE[0]} times",
        f"above {SPIKE[1]} times; above {SPIKE[0]} times in more than {OFTEN:.0%} of the steps; not finite",
        courses.gradients,
        "lower `optim.lr` or `optim.clip_norm`, and look at the mismatch of that step",
        "the norm reacts before reward and KL do (IcePop)",
    ),
    Course(
        "entropy", "entropy", "steady",
        f"a fifth of its initial value; {ENTROPY_RISE[0]} times that value and 0.5 nats more",
        f"below {ENTROPY_FLOOR:g} nats; a twentieth of its initial value; {ENTROPY_RISE[1]} times that value "
        "and 1 nat more",
        courses.entropy,
        "if it falls, raise `loss.clip_high` or `loss.entropy_coef`; if it rises in FP8, set "
        "`loss.calibrate_clip_every`",
        "falls: DAPO (2503.14476); rises: calibrated clipping (2609.22870). One level milder if the reward "
        "rose",
    ),
    Fault(
        "engine/healthy", "the engine was not healthy", "1", lambda value, r: max(0.0, 1 - value),
        "look at the engine's log",
        "the engine reports it",
    ),
    Course(
        "engine/restarts", "restarts", "0", "any", f"in more than {OFTEN:.0%} of the steps", courses.restarts,
        "look at the engine's log", "the same failure is likely to recur",
    ),
)


class Verdict(NamedTuple):
    """`level`: the worst finding's level; None if no step could be judged. `findings`: the worst first."""

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
        texts = [f.text for f in self.findings[:SHOWN]]
        texts += [f"and {more} more"] if (more := len(self.findings) - SHOWN) > 0 else []
        return ": ".join([self.word, *(["; ".join(texts)] if texts else [])])


def verdict(records: Records) -> Verdict:
    """The verdict on a run's records, the lines of metrics.jsonl with non-finite numbers as floats."""
    judged = {rule.key for rule in RULES if not rule.key.startswith("eval/")}
    if not any(is_number(r.get(key)) for r in records for key in judged):
        return Verdict(None)
    findings = [found for rule in RULES if (found := rule.judge(records))]
    findings.sort(key=lambda f: -f.level)
    return Verdict(findings[0].level if findings else Level.HEALTHY, tuple(findings))


def level_of(key: str, record: Mapping[str, Any]) -> Level | None:
    """The level of one step's value in its record; None for a metric without bounds."""
    return max((rule.level_in(record) for rule in RULES if isinstance(rule, Bound) and rule.key == key),
               default=None)


class Watch:
    """Notes each metric at the first step in which it is ill; one that noise raises, also at the first
    without noise."""

    def __init__(self):
        self._noted: set[tuple[str, bool]] = set()

    def notes(self, record: Mapping[str, Any]) -> list[str]:
        found = []
        for rule in RULES:
            value: Any = record.get(rule.key)
            if not (isinstance(rule, Bound) and rule.once and is_number(value)):
                continue
            by_noise = rule.by_noise and has_noise(record)
            if (rule.key, by_noise) in self._noted:
                continue
            if rule.level_of(value) == Level.ILL:
                self._noted.add((rule.key, by_noise))
                remedy = NOISE if by_noise else rule.remedy
                found.append(
                    f"step {record['step']}: {rule.name} {rule.show(value)} (healthy {rule.healthy}); "
                    f"{remedy}")
        return found


def ranges(key: str) -> str:
    """The healthy range of a metric in words; "" if it has none."""
    return ", ".join(rule.healthy for rule in RULES if rule.key == key)


def table() -> str:
    """RULES as the Markdown table of docs/health.md."""
    rows = [(f"`{r.key}`", r.healthy, r.warning, r.ill, r.remedy, r.source) for r in RULES]
    head = "| metric | healthy | warning | ill | what to do | source |\n|---|---|---|---|---|---|\n"
    linked = lambda text: re.sub(r"docs/([\w.#-]+)", r"[\1](\1)", text)
    return head + "".join(f"| {' | '.join(map(linked, row))} |\n" for row in rows)


if __name__ == "__main__":
    print(table(), end="")
