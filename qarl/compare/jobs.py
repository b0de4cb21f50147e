"""A run of a comparison: its folder, what was asked of it, and how it ended."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qarl.checkpoint import write_atomically
from qarl.compare.experiment import Arm
from qarl.errors import ConfigurationError
from qarl.recipe import Recipe, changed_keys, load_recipe, to_toml
from qarl.runfolder import RunFolder

State = Literal["finished", "stopped", "failed", "unfinished"]
"""`stopped`: by its health rules; `unfinished`: interrupted, or not begun. The others are results."""

ASKED_FILE, CONSOLE_FILE, OUTCOME_FILE = "asked.toml", "console.log", "outcome.json"

NOT_COMPARED = "checkpoint"
"""A table of the recipe that does not change what a run measures."""

INTERRUPTED = (130, -signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP)
"""Exit codes of a run that was asked to end, which goes on another time; by a signal itself, when it had just begun."""

_STOPPED = re.compile(r"stopped after step (?P<step>\d+): (?P<why>.*)", re.S)
_KEPT = re.compile(r"; (\S+ is the last checkpoint|no checkpoint was saved yet)$")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, and why where that was early."""

    state: State
    reason: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A run of an arm with a seed, in its folder."""

    arm: Arm
    seed: int
    folder: RunFolder

    @property
    def name(self) -> str:
        return f"{self.arm.name}/seed-{self.seed}"

    @property
    def recipe(self) -> Recipe:
        return self.arm.recipes[self.seed]

    @property
    def console(self) -> Path:
        """What the run said."""
        return self.folder.path / CONSOLE_FILE

    @property
    def asked(self) -> Path:
        """The recipe that it is given."""
        return self.folder.path / ASKED_FILE

    def outcome(self) -> Outcome:
        """How the run ended; unfinished where nobody has seen it end."""
        path = self.folder.path / OUTCOME_FILE
        return Outcome(**json.loads(path.read_text(encoding="utf-8"))) if path.exists() else Outcome("unfinished")

    def begin(self) -> None:
        """Write what is asked, and forget how an earlier try ended."""
        self.folder.path.mkdir(parents=True, exist_ok=True)
        write_atomically(self.asked, to_toml(self.recipe))
        (self.folder.path / OUTCOME_FILE).unlink(missing_ok=True)

    def end(self, code: int, keep_checkpoints: bool) -> Outcome:
        """Record how the run's process ended: with this exit code, or by the signal -`code`.

        A run that is done has no use for its checkpoints; one that failed may be tried again from them.
        """
        outcome = outcome_of(code, self.console.read_text(encoding="utf-8", errors="replace"))
        if outcome.state == "unfinished":
            return outcome
        if not keep_checkpoints and outcome.state != "failed":
            shutil.rmtree(self.folder.checkpoints, ignore_errors=True)
        text = json.dumps({"state": outcome.state, "reason": outcome.reason}, indent=1)
        write_atomically(self.folder.path / OUTCOME_FILE, text + "\n")
        return outcome


def jobs_in(out: Path, runs: Sequence[tuple[Arm, int]]) -> list[Job]:
    """The runs with their folders; ConfigurationError where one holds a run of another recipe."""
    jobs = [Job(arm, seed, RunFolder((out / arm.name / f"seed-{seed}").absolute())) for arm, seed in runs]
    for job in jobs:
        _check_recipe(job)
    return jobs


def outcome_of(code: int, said: str) -> Outcome:
    """What a process that ended with this exit code, having said this, came to."""
    if code == 0:
        return Outcome("finished")
    if code in INTERRUPTED:
        return Outcome("unfinished")
    if code < 0:
        return Outcome("failed", f"ended by {signal.Signals(-code).name}")
    reason = _last_words(said)
    stopped = _STOPPED.match(reason)
    return Outcome("failed", reason) if stopped is None else Outcome("stopped", stopped["why"])


def _last_words(said: str) -> str:
    """The reason on a failed command's last line, without where its checkpoint lies; of a bug the exception."""
    _, found, reason = said.rpartition("qarl: ")
    if not found:
        reason = said.strip().rpartition("\n")[2] or "it said nothing"
    return _KEPT.sub("", " ".join(reason.split()))


def _check_recipe(job: Job) -> None:
    if not job.asked.exists():
        if job.folder.recipe.exists():
            raise ConfigurationError(f"{job.folder.path}: holds a run that no comparison started; choose another --out")
        return
    changed = [key for key in changed_keys(load_recipe(job.asked), job.recipe) if key.split(".")[0] != NOT_COMPARED]
    if changed:
        raise ConfigurationError(
            f"{job.folder.path}: holds a run with other values of {', '.join(changed)}; put them back, remove the "
            "folder to run it again, or choose another --out"
        )
