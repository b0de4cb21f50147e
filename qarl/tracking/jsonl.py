"""`metrics.jsonl`, one object a step, and `evaluations.jsonl`, one object an evaluation. Always written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl.records import Group, GroupRewards

METRICS_FILE = "metrics.jsonl"
EVALUATIONS_FILE = "evaluations.jsonl"


class MetricsFiles:
    """Appends to both files and flushes every line, so that a killed run leaves what it measured.

    Lines of `first_step` and later, left by a run that went past the checkpoint now resumed from, are dropped.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        drop_lines_from(folder / METRICS_FILE, first_step)
        drop_lines_from(folder / EVALUATIONS_FILE, first_step)
        self._metrics = (folder / METRICS_FILE).open("a", encoding="utf-8")
        self._evaluations = (folder / EVALUATIONS_FILE).open("a", encoding="utf-8")

    def rollout(self, step: int, groups: Sequence[Group], rewards: Sequence[GroupRewards]) -> None:
        """Completions have files of their own."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics.write(json_line({"step": step, **metrics}))
        self._metrics.flush()

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._evaluations.write(json_line({"step": step, **metrics}))
        self._evaluations.flush()

    def close(self) -> None:
        self._metrics.close()
        self._evaluations.close()


def json_line(row: Mapping[str, Any]) -> str:
    """One line of strict JSON: a NaN or an infinity, which JSON lacks, becomes null."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()
    }
    return json.dumps(finite, allow_nan=False) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every complete line; a last line cut short by a kill is not one. A missing file has no lines."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def drop_lines_from(path: Path, first_step: int) -> None:
    """Keep the lines of steps before `first_step`; replaces the file in one piece."""
    if not path.exists():
        return
    kept = [row for row in read_lines(path) if row["step"] < first_step]
    aside = path.with_suffix(".jsonl.tmp")
    aside.write_text("".join(json_line(row) for row in kept), encoding="utf-8")
    aside.replace(path)
