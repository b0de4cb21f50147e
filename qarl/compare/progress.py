"""A comparison on the terminal: a line when a run begins or ends, and a live count below where there is a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from qarl.compare.experiment import Experiment
from qarl.compare.jobs import Job
from qarl.compare.pool import Watcher
from qarl.compare.results import RunResult, measure
from qarl.compare.table import early_end
from qarl.errors import suggestion
from qarl.tracking.jsonl import METRICS_FILE, read_lines

LOOK_S = 2.0


class Narrator(Watcher):
    """Records how runs end, and says so to `stream`."""

    def __init__(self, experiment: Experiment, jobs: Sequence[Job], stream: TextIO) -> None:
        self._experiment = experiment
        self._jobs = jobs
        self._done = 0
        self._begun: dict[Job, float] = {}
        self._looked = 0.0
        self._unknown: set[str] = set()
        self._terminal = Console(file=stream, highlight=False, soft_wrap=True)
        # Without a thread of its own: children are started from this process.
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f} of {task.total:.0f} steps"),
            TimeElapsedColumn(),
            console=self._terminal,
            auto_refresh=False,
            transient=True,
            disable=not self._terminal.is_terminal,
        )
        self._task = self._bar.add_task("", total=sum(job.recipe.steps for job in jobs))

    def __enter__(self) -> Narrator:
        self._bar.start()
        return self

    def __exit__(self, *caught: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        self._terminal.print(text, markup=False)

    def begun(self, job: Job, running: int) -> None:
        self._begun[job] = time.monotonic()
        self.say(f"{job.name} begins; {self._counts(running)}")

    def ended(self, job: Job, code: int, running: int) -> None:
        outcome = job.end(code, self._experiment.keep_checkpoints)
        self._done += outcome.state != "unfinished"
        seconds = time.monotonic() - self._begun[job]
        said = headline(measure(job, self._experiment), self._experiment.metric)
        self.say(f"{job.name} {said}; {seconds:.0f} s; {self._counts(running)}")
        self._warn(job)

    def passed(self) -> None:
        if self._bar.disable or time.monotonic() < self._looked + LOOK_S:
            return
        self._looked = time.monotonic()
        done = sum(_lines(job) for job in self._jobs)
        self._bar.update(self._task, completed=done)
        self._bar.refresh()

    def stopping(self, running: int) -> None:
        self.say(f"stopping: {running} running are asked to save; interrupt twice more to quit without")

    def _counts(self, running: int) -> str:
        text = f"{self._done} of {len(self._jobs)} done, {running} running"
        self._bar.update(self._task, description=text)
        return text

    def _warn(self, job: Job) -> None:
        """Once for every metric that nobody measures: its name may be misspelled."""
        rows = read_lines(job.folder.path / METRICS_FILE)
        known = {name for row in rows for name in row}
        for name in self._experiment.metrics if known else ():
            if name not in known and not name.startswith("eval/") and name not in self._unknown:
                self._unknown.add(name)
                self.say(f"warning: {job.name} has not measured {name}{suggestion(name, known)}")


def headline(run: RunResult, metric: str) -> str:
    """`finished, eval/held_out/pass@1 0.845`."""
    state = "finished" if run.state == "finished" else early_end(run)
    return f"{state}, {metric} {run.figures[metric]:.4g}" if metric in run.figures else state


def _lines(job: Job) -> int:
    path = job.folder.path / METRICS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0
