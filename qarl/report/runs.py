"""`qarl report`: one page about one or several runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qarl.report.alignment import alignment
from qarl.report.completions import browser
from qarl.report.curves import curves
from qarl.report.history import read_runs
from qarl.report.overview import overview, recipes
from qarl.report.page import check_writable, write_page
from qarl.rollout.request import Progress

STEPS_NOTE = "Steps count from 0, as in the runs' files: a reading at step 5 is of weights that 5 steps have trained."


def report(
    runs: Sequence[Path],
    out: Path,
    per_step: int | None,
    align_tokens: int,
    say: Callable[[str], None],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the page about these run folders to `out`; returns its path, the runs and its size in bytes.

    `per_step` bounds the completions shown of a step (None: as many as keep the page small); `align_tokens` are
    compared for the table by layer, none with 0. `say` is told what of the runs' files could not be read.
    """
    check_writable(out)
    histories = read_runs(runs)
    for sentence in (sentence for one in histories for sentence in one.damage):
        say(sentence)
    sections = [
        *overview(histories),
        *curves(histories),
        *([] if per_step == 0 else [browser(histories, per_step)]),
        alignment(histories, align_tokens, progress),
        recipes(histories),
    ]
    title = histories[0].name if len(histories) == 1 else f"{len(histories)} runs"
    size = write_page(out, f"qarl: {title}", sections, STEPS_NOTE)
    return {"path": str(out), "runs": [str(one.folder.path) for one in histories], "bytes": size}
