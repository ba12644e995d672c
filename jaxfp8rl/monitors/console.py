"""The run on the terminal: a live progress line where there is one to draw on, one plain line a step elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from jaxfp8rl.monitors.base import Record

# (metric, label, format): what a reader watches; a record shows those it holds, an evaluation's first.
_SHOWN = (
    ("eval/reward_mean", "held-out", ".3f"),
    ("reward/mean", "reward", ".3f"),
    ("mismatch/token_mult_prob_error", "mismatch", ".4f"),
    ("tokens/rollout_per_s", "tok/s", ",.0f"),
)


class ConsoleMonitor:
    """Shows steps out of `total_steps`. `note` prints a line of text above the progress."""

    def __init__(self, total_steps: int, console: Console | None = None):
        self.total_steps = total_steps
        self.console = console or Console(highlight=False)
        self._started: tuple[int, float] | None = None  # (step, clock) of the first record
        self._progress = self._live() if self.console.is_terminal else None

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)  # a record is one line, however narrow

    def log(self, record: Record) -> None:
        step = int(record["step"])
        left = self._time_left(step)
        facts = [f"{label} {record[key]:{form}}" for key, label, form in _SHOWN if isinstance(record.get(key), int | float)]
        if self._progress is None:
            return self.note("  ".join([f"step {step}/{self.total_steps}", *facts, *([f"left {left}"] if left else [])]))
        if "eval/reward_mean" in record:  # stays on the screen; the progress line is overwritten each step
            self.note(f"step {step}: held-out reward {record['eval/reward_mean']:.3f}")
        facts = [fact for fact in facts if not fact.startswith("held-out")]
        self._progress.update(self._task, completed=step, facts="  ".join(facts), left=left)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def _live(self) -> Progress:
        progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=10), TextColumn("{task.fields[facts]}"),
            TextColumn("left {task.fields[left]}"), console=self.console,
        )  # fmt: skip
        self._task = progress.add_task("train", total=self.total_steps, facts="", left="")
        progress.start()
        return progress

    def _time_left(self, step: int) -> str:
        """minutes:seconds until the last step at the mean pace since the first record; "" before there is a pace."""
        now = time.monotonic()
        if self._started is None:
            self._started = (step, now)
        first, since = self._started
        if step == first:
            return ""
        seconds = round((now - since) / (step - first) * (self.total_steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
