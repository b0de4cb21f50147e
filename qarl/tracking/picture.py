"""`summary.png`: the run at a glance, drawn from its metrics files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.tracking.jsonl import EVALUATIONS_FILE, METRICS_FILE, read_lines

PICTURE_FILE = "summary.png"


def draw(folder: Path) -> Path:
    """Draw reward with the held-out points, engine/learner mismatch and completion length; returns the picture."""
    # The object interface, not pyplot: pyplot keeps global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = read_lines(folder / METRICS_FILE)
    evaluations = read_lines(folder / EVALUATIONS_FILE)
    figure = Figure(figsize=(7, 8), layout="constrained")
    FigureCanvasAgg(figure)
    reward, mismatch, length = figure.subplots(3, 1, sharex=True)
    figure.suptitle(folder.name)

    reward.plot(*points(steps, "reward/mean"), marker=".", label="training reward")
    for name in held_out_names(evaluations):
        reward.plot(*points(evaluations, name), marker="o", linestyle="--", label=f"held-out {name.rpartition('/')[2]}")
    reward.set_ylabel("reward")
    reward.legend(loc="best", fontsize="small")

    for name in ("mismatch/max_abs", "mismatch/mean_abs"):
        mismatch.plot(*points(steps, name), marker=".", label=name)
    mismatch.set_ylabel("|learner - engine| log-prob")
    # Linear below a float32's resolution and from 0 up: an exact run is a line on the axis, not an empty picture.
    mismatch.set_yscale("symlog", linthresh=1e-7)
    mismatch.set_ylim(bottom=0.0)
    mismatch.legend(loc="best", fontsize="small")

    for name in ("completion/length_mean", "completion/length_max"):
        length.plot(*points(steps, name), marker=".", label=name)
    length.set_ylabel("tokens")
    length.set_ylim(bottom=0.0)
    length.set_xlabel("finished steps")
    length.legend(loc="best", fontsize="small")

    path = folder / PICTURE_FILE
    figure.savefig(path, dpi=120)
    return path


def points(rows: Sequence[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric; a step without it is left out, null is a gap."""
    present = [row for row in rows if name in row]
    return [row["step"] for row in present], [math.nan if row[name] is None else row[name] for row in present]


def held_out_names(evaluations: Sequence[dict[str, Any]]) -> list[str]:
    """The pass@k figures among the evaluations' metrics, in order of appearance."""
    return list(dict.fromkeys(name for row in evaluations for name in row if "/pass@" in name))
