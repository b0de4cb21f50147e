"""`metrics.jsonl`, one object a step, and `evaluations.jsonl`, one object an evaluation. Always written."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl.records import Group, GroupRewards

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"

_log = logging.getLogger(__name__)


class MetricsFiles:
    """Every line is in its file at once, so that a killed run leaves what it measured. OSError when the disk refuses.

    Of what a run left that went past the checkpoint now resumed from, lines of steps `first_step` and later are
    dropped, and of evaluations those after more than `first_step` steps: one after as many is of these weights.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        drop_lines_from(folder / METRICS_FILE, first_step)
        drop_lines_from(folder / EVALUATIONS_FILE, first_step + 1)
        self._metrics = folder / METRICS_FILE
        self._evaluations = folder / EVALUATIONS_FILE
        self._metrics.touch()
        self._evaluations.touch()

    def rollout(self, step: int, groups: Sequence[Group], rewards: Sequence[GroupRewards]) -> None:
        """Completions have files of their own."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        # Opened for each line: what a full disk refuses must not wait in a buffer and come later, or never.
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json_line({"step": step, **metrics}))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        # One of the same step, measured before a resume, gives way: the file is short, and replaced as a whole.
        earlier = [row for row in read_lines(self._evaluations) if row["step"] < step]
        _replace(self._evaluations, [*earlier, {"step": step, **metrics}])

    def close(self) -> None:
        """Nothing is open between lines."""


def json_line(row: Mapping[str, Any]) -> str:
    """One line of strict JSON: a NaN or an infinity, which JSON lacks, becomes null."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete line; a last line cut short by a kill is not one. A missing file has no lines.

    A line that is damaged is passed over, with a warning that names it.
    """
    rows, damaged = sift_lines(path)
    for number in damaged:
        _log.warning("%s, line %d: passed over, it is no JSON object with a step", path, number)
    return rows


def sift_lines(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """As `read_lines`, and the numbers of the damaged lines, from 1 on, of which nothing is said."""
    if not path.exists():
        return [], []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    found = [_row(line) for line in lines]
    damaged = [number for number, row in enumerate(found, 1) if row is None]
    return [row for row in found if row is not None], damaged


def drop_lines_from(path: Path, first_step: int) -> None:
    """Keep the lines of steps before `first_step`; replaces the file in one piece."""
    if path.exists():
        _replace(path, [row for row in read_lines(path) if row["step"] < first_step])


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, digits without end, or brackets without end
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _replace(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    aside = path.with_suffix(".jsonl.tmp")
    with aside.open("w", encoding="utf-8") as file:
        file.write("".join(json_line(row) for row in rows))
        file.flush()
        # Renamed before it is on the disk, it could be empty after a power cut, and the old lines gone.
        os.fsync(file.fileno())
    aside.replace(path)
