"""The results as Markdown: arms in their order, what it took to reach the targets, and what did not finish."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qarl.compare.results import Results, RunResult
from qarl.compare.statistics import Arrivals, Estimate, arrivals, estimate, paired

MOST_NAMES = 5
"""Of runs that have not begun; the others are counted."""


def write_table(results: Results) -> str:
    """The whole text of `table.md`."""
    parts = [f"# {results.name}", markdown(main_rows(results)), notes(results)]
    targets = target_rows(results)
    if targets:
        parts += [
            f"## Until {results.settings['target_metric']} reached a target",
            markdown(targets),
            target_note(results),
        ]
    ended = [f"- {line}" for line in early_ends(results)]
    if ended:
        parts += ["## Runs that did not finish", "\n".join(ended)]
    return "\n\n".join(part for part in parts if part) + "\n"


def main_rows(results: Results) -> list[dict[str, str]]:
    """A row for every arm, the best first; arms without a reading last."""
    settings = results.settings
    metric, baseline = settings["metric"], settings["baseline"]
    rows = []
    for name in ranked(results):
        runs = results.runs_of(name)
        row = {"arm": results.arms[name].title, "runs": _runs(results, name)}
        for column in results.metrics:
            row[column] = shown_estimate(estimate(list(results.values(name, column).values())))
            if column == metric and baseline is not None:
                row["difference"] = _difference(results, name)
        row["s/step"] = _shown_mean([run.seconds / run.steps for run in runs])
        row["tokens"] = _shown_mean([float(run.tokens) for run in runs])
        rows.append(row)
    return rows


def ranked(results: Results) -> list[str]:
    """Names of the arms that have begun, by the metric, the best first."""
    sign = -1.0 if results.settings["better"] == "higher" else 1.0
    begun = [name for name in results.arms if any(run.arm == name and run.has_begun for run in results.runs)]
    found = {name: estimate(list(results.values(name, results.settings["metric"]).values())) for name in begun}
    return sorted(found, key=lambda name: math.inf if (one := found[name]) is None else sign * one.mean)


def target_rows(results: Results) -> list[dict[str, str]]:
    """A row for every arm: median steps, tokens and seconds to each target, and how many runs got there."""
    rows = []
    for name in ranked(results) if results.settings["targets"] else []:
        runs = results.runs_of(name)
        row = {"arm": results.arms[name].title}
        for place, target in enumerate(results.settings["targets"]):
            reached = [run.arrivals[place] for run in runs]
            for what in ("steps", "tokens", "seconds"):
                found = arrivals([None if one is None else float(getattr(one, what)) for one in reached])
                row[f"{target:g}: {what}"] = shown_arrivals(found)
        rows.append(row)
    return rows


def notes(results: Results) -> str:
    """What the figures are, and what is missing from them."""
    settings = results.settings
    said = [
        "Mean over seeds ± half the width of its 95 % interval (Student's t). Metrics of evaluations: the last one; "
        f"others: mean of the last {settings['window']} steps."
    ]
    if settings["baseline"] is not None:
        title = results.arms[settings["baseline"]].title
        said.append(f"Difference: of {settings['metric']} to “{title}”, run by run of the same seed.")
    if any(len(results.runs_of(name)) == 1 for name in results.arms):
        said.append("An arm with one run has no interval.")
    said += [f"No run has measured `{name}`." for name in _unmeasured(results)]
    return " ".join(said)


def target_note(results: Results) -> str:
    settings = results.settings
    reading = (
        "an evaluation"
        if settings["target_metric"].startswith("eval/")
        else f"the mean of the last {settings['window']} steps"
    )
    return (
        f"Reached: {reading} is at least the target. Medians over the runs that got there; where not all did, their "
        "number stands beside. Seconds are those of steps on this machine, evaluations left out."
    )


def early_ends(results: Results) -> list[str]:
    """A line for every run that stopped, failed, or is not finished, and one for those that have not begun."""
    waiting = [run for run in results.runs if not run.has_begun]
    lines = [
        f"{run.name}: {early_end(run)}{_old_reading(results, run)}"
        for run in results.runs
        if run.state != "finished" and run not in waiting
    ]
    names = ", ".join(run.name for run in waiting[:MOST_NAMES])
    more = len(waiting) - MOST_NAMES
    return [*lines, *([f"not begun: {names}{f' and {more} more' if more > 0 else ''}"] if waiting else [])]


def early_end(run: RunResult) -> str:
    """`stopped at step 41: ...`; empty for a run that finished."""
    reason = f": {run.reason}" if run.reason else ""
    if run.state == "finished":
        return ""
    if run.state == "unfinished":
        return f"not finished, {run.steps} of {run.planned} steps; left out of the tables"
    return f"{run.state} at step {run.steps}{reason}"


def shown_estimate(found: Estimate | None) -> str:
    """`0.812 ± 0.031`: two digits of the half width, and the mean to the same place."""
    if found is None:
        return "–"
    if not found.half_width:
        return _plain(found.mean) + ("" if found.half_width is None else " ± 0")
    places = max(0, 1 - math.floor(math.log10(found.half_width)))
    if places > 6:
        return f"{found.mean:.3g} ± {found.half_width:.2g}"
    return f"{found.mean:,.{places}f} ± {found.half_width:,.{places}f}"


def shown_arrivals(found: Arrivals) -> str:
    """`38`, `41 (2 of 3)`, or `never`."""
    if found.median is None:
        return "never" if found.count else "–"
    median = f"{found.median:,.0f}" if found.median >= 100 else f"{found.median:.3g}"
    return median if found.arrived == found.count else f"{median} ({found.arrived} of {found.count})"


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """Aligned, so that it is a table in a terminal too."""
    cells = [list(rows[0]), *([one.replace("|", "\\|") for one in row.values()] for row in rows)]
    widths = [max(2, *map(len, column)) for column in zip(*cells, strict=True)]
    lines = [_line(row, widths) for row in cells]
    rule = "| " + " | ".join(
        ("-" * width if place == 0 else "-" * (width - 1) + ":") for place, width in enumerate(widths)
    )
    return "\n".join([lines[0], rule + " |", *lines[1:]])


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if place == 0 else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"


def _shown_mean(values: Sequence[float]) -> str:
    return _plain(math.fsum(values) / len(values)) if values else "–"


def _plain(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"


def _runs(results: Results, name: str) -> str:
    """`3`, or `3, 1 stopped`: how many ended, and how many of them early."""
    states = [run.state for run in results.runs if run.arm == name and run.state != "unfinished"]
    early = [f"{states.count(state)} {state}" for state in ("stopped", "failed") if state in states]
    return ", ".join([str(len(states)), *early])


def _difference(results: Results, name: str) -> str:
    metric, baseline = results.settings["metric"], results.settings["baseline"]
    if name == baseline:
        return "baseline"
    found = shown_estimate(paired(results.values(name, metric), results.values(baseline, metric)))
    return found if found.startswith(("-", "–")) else f"+{found}"


def _old_reading(results: Results, run: RunResult) -> str:
    """A run that ended early was perhaps last evaluated long before."""
    metric = results.settings["metric"]
    if not run.counts or not metric.startswith("eval/"):
        return ""
    step = run.last_evaluated(metric)
    return "" if step is None or step == run.steps else f" (its {metric} is that after {step} steps)"


def _unmeasured(results: Results) -> list[str]:
    if not any(run.counts for run in results.runs):
        return []
    measured = {name for run in results.runs for name in run.figures}
    return [name for name in results.metrics if name not in measured]
