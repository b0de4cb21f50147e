"""The run on the terminal: a line a step, and a progress bar below them where there is a terminal to draw on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from qarl.records import Group, GroupRewards

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward/mean", ".3f"),
    ("length", "completion/length_mean", ".1f"),
    ("mismatch", "mismatch/max_abs", ".1e"),
    ("ratio_max", "objective/ratio_max", ".4f"),
    ("tok/s", "perf/rollout_tokens_per_s", ".0f"),
    ("s", "time/step", ".2f"),
)
"""(heading, metric, format) of what a step's line shows."""


class Console:
    """Prints to `stream`: standard output, or standard error where a JSON result is to come on the former."""

    def __init__(self, stream: TextIO, first_step: int, steps: int) -> None:
        self._terminal = Terminal(file=stream, highlight=False, soft_wrap=True)
        self._steps = steps
        self._first_step = first_step
        self._started = time.perf_counter()
        self.is_lost = False
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._terminal,
            transient=True,
            disable=not self._terminal.is_terminal,
        )
        self._step_task = self._bar.add_task("steps", total=steps, completed=first_step)
        self._rollout_task = self._bar.add_task("rollout", total=None)

    def open(self) -> None:
        """Draw the bars from now on, and count the time per step from now."""
        self._started = time.perf_counter()
        self._show(self._bar.start)

    def say(self, text: str) -> None:
        """Print above the bars."""
        self._show(lambda: self._terminal.print(text, markup=False))

    def rolling_out(self, finished: int, total: int) -> None:
        """Show how many completions of this rollout are finished."""
        self._show(lambda: self._bar.update(self._rollout_task, completed=finished, total=total))

    def _show(self, draw: Callable[[], object]) -> None:
        """Nobody may be looking any more: a closed pipe or terminal ends what is shown, and not the run."""
        if self.is_lost:
            return
        try:
            draw()
        except (OSError, SystemExit):  # rich turns a broken pipe into an exit
            self.is_lost = True

    def rollout(self, step: int, groups: Sequence[Group], rewards: Sequence[GroupRewards]) -> None:
        """Completions have files of their own."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        done = step + 1
        seconds_a_step = (time.perf_counter() - self._started) / (done - self._first_step)
        remaining = seconds_a_step * (self._steps - done)
        self.say(step_line(step, self._steps, metrics, remaining))
        self._show(lambda: self._bar.update(self._step_task, completed=done))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.say(evaluation_line(step, metrics))

    def close(self) -> None:
        self._show(self._bar.stop)


class LogLines(logging.Handler):
    """Sends log records to the console, so that they do not run through its bars."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        self._console.say(self.format(record))


def step_line(step: int, steps: int, metrics: Mapping[str, float], remaining_s: float) -> str:
    """`step 3/15  reward 0.422  ...  ETA 1:02`; a metric this run does not measure is left out."""
    shown = [f"{heading} {metrics[name]:{fmt}}" for heading, name, fmt in COLUMNS if name in metrics]
    minutes, seconds = divmod(round(remaining_s), 60)
    hours, minutes = divmod(minutes, 60)
    eta = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
    return "  ".join([f"step {step + 1}/{steps}", *shown, f"ETA {eta}"])


def evaluation_line(step: int, metrics: Mapping[str, float]) -> str:
    """`held-out after 0 steps  pass@1 0.115 (0.078 to 0.167)  ...`; a run has one set of held-out questions."""
    figures = {name.rpartition("/")[2]: value for name, value in metrics.items()}
    shown = [
        f"{name} {value:.4g}{with_interval(figures, name)}"
        for name, value in figures.items()
        if not name.endswith(("_low", "_high"))
    ]
    return "  ".join([f"held-out after {step} steps", *shown])


def with_interval(figures: Mapping[str, float], name: str) -> str:
    """` (0.078 to 0.167)` where the figure has an interval, else nothing."""
    if f"{name}_low" not in figures:
        return ""
    return f" ({figures[f'{name}_low']:.3f} to {figures[f'{name}_high']:.3f})"
