"""The run on the terminal: one permanent line a step. On an interactive terminal, a live line below it shows
the progress, a sparkline of the reward, and the current phase."""

from __future__ import annotations

import threading
import time

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from jaxfp8rl.health.table import STYLES, level_of
from jaxfp8rl.monitors import quiet
from jaxfp8rl.monitors.base import Record
from jaxfp8rl.monitors.sparkline import sparkline

# (metric, label, format) of the metrics to watch. A line shows those that its record holds, as many as fit.
_SHOWN = (
    ("eval/reward_mean", "held-out", ".3f"),
    ("reward/mean", "reward", ".3f"),
    ("mismatch/token_mult_prob_error", "mismatch", ".4f"),
    ("tokens/rollout_per_s", "tok/s", ",.0f"),
)
COLUMNS = 80  # maximal width of a line, in a file too
# JAX's events at the start and the end of a compilation
BEGINS, ENDS = "/jax/core/compile/jaxpr_to_mlir_module_duration", "/jax/core/compile/backend_compile_duration"
SHORTEST_SHOWN = 0.05  # in seconds; a shorter phase gets no line
BETWEEN_LINES = 60.0  # seconds between two lines of a phase's progress where there is no live line


def _style(key: str, record: Record) -> str:
    """The colour of a metric's value by its healthy range; "" without a range."""
    level = level_of(key, record)
    return "" if level is None else STYLES[level]


class ConsoleMonitor:
    """Shows steps, or whatever `of` names, out of `total_steps`. `note` prints a line of text. `phase` starts
    a phase, which the live line names; when a phase ends for the first time, its seconds and its compilation
    time are printed."""

    def __init__(self, total_steps: int, console: Console | None = None, of: str = "step"):
        self.total_steps, self._of = total_steps, of
        self.console = console or Console(highlight=False)
        self.doing = Doing()
        self._begun: dict[str, tuple[int, float]] = {}  # bar -> (step, clock) when first shown
        self._rewards: list[float] = []
        self._timed: set[str] = set()
        self._bars: set[str] = set()  # phases with a progress bar
        self._line_at = 0.0  # when a line of progress was last printed
        self._progress = self._live() if self.console.is_terminal else None
        jax.monitoring.register_event_duration_secs_listener(self.doing.compiled)

    def note(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)  # a record is one line, however narrow

    def phase(self, name: str) -> None:
        """Start the phase `name` and end the one before. The current phase's name again continues it."""
        if name == self.doing.name:
            return
        before, seconds, compiling = self.doing.begin(name)
        if self._progress is not None and before in self._bars:  # back to the bar of steps
            self._progress.update(self._task, description=self._of, completed=0, total=self.total_steps,
                                  left="")
        if before and before not in self._timed and seconds >= SHORTEST_SHOWN:
            self._timed.add(before)
            compile_time = f", {compiling:.1f} s of it compiling" if compiling >= SHORTEST_SHOWN else ""
            self.note(f"{before}: {seconds:.1f} s{compile_time}")

    def bar(self, name: str, done: int, total: int) -> None:
        """Show the progress of the phase `name`, whose parts take about equally long: in the live line, or
        where there is none in a line a minute."""
        first = name not in self._bars
        self._bars.add(name)
        left = f"left {took}" if (took := self._time_left(name, done, total)) else ""
        if self._progress is not None:
            self._progress.update(self._task, description=name, completed=done, total=total, left=left,
                                  refresh=first)
        elif first:
            self._line_at = time.monotonic()
        elif (now := time.monotonic()) - self._line_at >= BETWEEN_LINES and done < total:
            self._line_at = now
            self.note(f"{name}: {done:,} of {total:,}  {left}".rstrip())

    def log(self, record: Record) -> None:
        step = int(record["step"])
        left = self._time_left("step", step, self.total_steps)
        held = [(key, label, form) for key, label, form in _SHOWN if isinstance(record.get(key), int | float)]
        facts = [Text(f"{label} {record[key]:{form}}", _style(key, record))
                 for key, label, form in held]
        head, tail = [Text(f"step {step}/{self.total_steps}")], [Text(f"left {left}")] if left else []
        while (line := Text("  ").join([*head, *facts, *tail])).cell_len > COLUMNS and len(facts) > 1:
            facts.pop()
        self.console.print(line, soft_wrap=True)
        reward = record.get("reward/mean")
        self._rewards += [reward] if isinstance(reward, int | float) and reward == reward else []
        if "eval/reward_mean" in record and len(self._rewards) > 1:
            self.note(
                f"rewards so far  {self._rewards[0]:.3f} {sparkline(self._rewards)} {self._rewards[-1]:.3f}")
        if self._progress is not None:
            self._progress.update(
                self._task, description="step", completed=step, total=self.total_steps,
                left=f"left {left}" * bool(left),
                course=sparkline(self._rewards, 16) if self._rewards else "",
            )

    def close(self) -> None:
        self.phase("")
        self.doing.closed = True
        if self._progress is not None:
            self._progress.stop()

    def _live(self) -> Progress:
        progress = Progress(
            TextColumn("{task.description}"), MofNCompleteColumn(), BarColumn(bar_width=8),
            TextColumn("{task.fields[course]}"),
            TextColumn("{task.fields[left]}"), self.doing, console=self.console, transient=True,
            redirect_stderr=not quiet.active(),
        )
        self._task = progress.add_task(self._of, total=self.total_steps, course="", left="")
        progress.start()
        return progress

    def _time_left(self, name: str, step: int, total: int) -> str:
        """The remaining time as hours:minutes:seconds, at the mean pace since step 1, which compiles, or
        since the first record of a resumed run; "" until then."""
        if step == 0:  # an evaluation alone
            return ""
        now = time.monotonic()
        first, since = self._begun.setdefault(name, (step, now))
        if step == first:
            return ""
        seconds = round((now - since) / (step - first) * (total - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


class Doing(ProgressColumn):
    """The current phase, its seconds so far, and whether JAX is compiling, from JAX's monitoring events."""

    def __init__(self):
        super().__init__()
        self.name, self.closed, self._since, self._compiling, self._seconds = "", False, time.perf_counter(
            ), False, 0.0

    def begin(self, name: str) -> tuple[str, float, float]:
        """Start the phase `name` -> (the phase that ends, its seconds, its seconds of compilation)."""
        now = time.perf_counter()
        ended = self.name, now - self._since, self._seconds
        self.name, self._since, self._seconds = name, now, 0.0
        return ended

    def compiled(self, event: str, duration_secs: float, **_: str | int) -> None:
        """A listener of JAX's monitoring. JAX cannot unregister it, so it ignores events once the run has
        ended."""
        ahead = threading.current_thread().name == "compiler"  # while this phase goes on (training.programs)
        if event in (BEGINS, ENDS) and not (self.closed or ahead):
            self._compiling = event == BEGINS
            self._seconds += duration_secs

    def render(self, task: Task) -> Text:
        seconds = time.perf_counter() - self._since
        return Text(f"{self.name}{', compiling' * self._compiling} {seconds:.0f} s" if self.name else "")
