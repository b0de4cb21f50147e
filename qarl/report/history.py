"""What a run left in its folder, read for a page: its recipe, its metrics, what its log says of how it went."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qarl.errors import ConfigurationError
from qarl.recipe import Recipe, load_recipe
from qarl.runfolder import RunFolder, run_at
from qarl.tracking.jsonl import EVALUATIONS_FILE, METRICS_FILE, sift_lines

_ENTRY = re.compile(
    r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (?P<level>[A-Z]+) (?P<text>.*?)(?=^\d{4}-\d\d-\d\d |\Z)", re.M | re.S
)
"""An entry of run.log, which may have several lines."""


@dataclass(frozen=True, slots=True)
class History:
    """A run under the name that it has on the page; `steps` and `evaluations` are lines of its files.

    `log` has (level, text) of every entry of run.log, `damage` a sentence for every file with lines that are not whole.
    """

    name: str
    folder: RunFolder
    recipe: Recipe
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    log: list[tuple[str, str]]
    is_running: bool
    damage: tuple[str, ...]

    @property
    def done(self) -> int:
        """Finished steps, those before a resume included."""
        return int(self.steps[-1]["step"]) + 1

    @property
    def is_finished(self) -> bool:
        return self.done >= self.recipe.steps and not self.is_running and self.reason is None

    @property
    def reason(self) -> str | None:
        """Why the run ended early, as its log's last entry says; None where it says nothing of the kind."""
        return self.log[-1][1] if self.log and self.log[-1][0] == "ERROR" else None

    @property
    def warnings(self) -> list[str]:
        return [text for level, text in self.log if level in ("WARNING", "ERROR")]


def read_runs(paths: Sequence[Path]) -> list[History]:
    """Read run folders, in order; ConfigurationError for what is none, is named twice, or has no finished step."""
    folders = [Path(os.path.abspath(path)) for path in paths]
    twice = [path for path in folders if folders.count(path) > 1]
    if twice:
        raise ConfigurationError(f"{twice[0]}: is named twice; name every run once")
    return [_read(path, name) for path, name in zip(folders, short_names(folders), strict=True)]


def short_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as few as tell them apart."""
    for length in range(1, max(len(path.parts) for path in folders) + 1):
        names = [str(Path(*path.parts[-length:])) for path in folders]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("different paths have different names")


def _read(path: Path, name: str) -> History:
    folder = run_at(path)
    if folder is None:
        raise ConfigurationError(f"{path}: is no run folder, it has no recipe.toml; give one that `qarl train` made")
    found, damage = {}, []
    for file in (METRICS_FILE, EVALUATIONS_FILE):
        found[file], damaged = sift_lines(folder.path / file)
        if damaged:
            damage.append(f"{folder.path / file}: damaged lines are passed over: {', '.join(map(str, damaged))}")
    if not found[METRICS_FILE]:
        raise ConfigurationError(
            f"{folder.path / METRICS_FILE}: has no finished step to report on"
            + (f" ({damage[0]})" if damage else "; wait for the run's first one")
        )
    log = folder.log.read_text(encoding="utf-8", errors="replace") if folder.log.is_file() else ""
    return History(
        name=name,
        folder=folder,
        recipe=load_recipe(folder.recipe),
        steps=found[METRICS_FILE],
        evaluations=found[EVALUATIONS_FILE],
        log=[(entry["level"], entry["text"].strip()) for entry in _ENTRY.finditer(log)],
        is_running=folder.is_running(),
        damage=tuple(damage),
    )
