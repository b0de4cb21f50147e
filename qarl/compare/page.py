"""The results as one HTML page: tables, curves by arm, where the time went, in what the arms' recipes differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from qarl.compare.results import ALWAYS_DRAWN, CURVE_POINTS, Results, RunResult
from qarl.compare.table import early_end, early_ends, main_rows, notes, target_note, target_rows
from qarl.report.curves import MEANINGS
from qarl.report.figures import Curve, grid, lines, running_mean, table
from qarl.report.page import Section, write_page

Points = Mapping[float, float]


def write_comparison(path: Path, results: Results) -> None:
    """Write the page at `path`; ConfigurationError where it cannot be."""
    ended = [Markup("<li>{}</li>").format(line) for line in early_ends(results)]
    early = Markup("<ul>{}</ul>").format(Markup("").join(ended)) if ended else Markup("")
    sections = [Section("Results", _table(main_rows(results)) + early, notes(results).replace("`", ""))]
    targets = target_rows(results)
    if targets:
        title = f"Until {results.settings['target_metric']} reached a target"
        sections.append(Section(title, _table(targets), target_note(results)))
    sections += [_curves(results), _time(results), _recipes(results), _runs(results)]
    seeds = ", ".join(map(str, results.seeds))
    write_page(path, results.name, sections, f"{len(results.arms)} arms, seeds {seeds}.")


def points(run: RunResult, metric: str, window: int) -> Points:
    """Values by finished steps: an evaluation's as it is, a step's as the mean over `window` steps."""
    if metric.startswith("eval/"):
        rows = [(row["step"], row.get(metric)) for row in run.evaluations]
        return {float(step or 0): value for step, value in rows if value is not None}
    width = math.ceil(run.planned / CURVE_POINTS)
    means = running_mean(run.curves.get(metric, []), max(1, window // width))
    return {
        float(step or 0): value for step, value in zip(run.curves["step"], means, strict=False) if value is not None
    }


def arm_curves(results: Results, arm: str, metric: str) -> list[Curve]:
    """The arm's single runs, faint; and their mean, with a band from the lowest to the highest, where all that ended
    have a reading: a mean of those that are left would look better than the arm is.
    """
    title, window = results.arms[arm].title, results.settings["window"]
    singles = {run.seed: points(run, metric, window) for run in results.runs if run.arm == arm}
    curves = [
        Curve(f"{title}, seed {seed}", list(one), list(one.values()), group=title, faint=True)
        for seed, one in singles.items()
    ]
    ended = [singles[run.seed] for run in results.runs_of(arm)]
    common = sorted(set.intersection(*(set(one) for one in ended))) if ended else []
    at = [[one[step] for one in ended] for step in common]
    mean = [math.fsum(values) / len(values) for values in at]
    low, high = ([min(values) for values in at], [max(values) for values in at]) if len(ended) > 1 else (None, None)
    return [*curves, Curve(title, common, mean, low, high, group=title)]


def _curves(results: Results) -> Section:
    metrics = dict.fromkeys([*results.metrics, *ALWAYS_DRAWN])
    figures = []
    for metric in metrics:
        curves = [curve for arm in results.arms for curve in arm_curves(results, arm, metric)]
        if any(len(curve.x) for curve in curves):
            unit, meaning = MEANINGS.get(metric, ("", ""))
            figures.append(lines(f"{metric}: {meaning}" if meaning else metric, "finished steps", unit, curves))
    note = (
        "Thick: mean of the arm's runs, where all that ended have a reading; band: from the lowest to the highest; "
        f"thin: single runs. Metrics of steps are means of the last {results.settings['window']} steps."
    )
    return Section("Curves", grid(figures), note)


def _time(results: Results) -> Section:
    """Where an arm's seconds went."""
    rows = []
    for name, arm in results.arms.items():
        runs = results.runs_of(name)
        seconds = math.fsum(run.seconds for run in runs)
        if not seconds:
            continue
        parts = dict.fromkeys(part for run in runs for part in run.parts)
        shares = {part: math.fsum(run.parts.get(part, 0.0) for run in runs) / seconds for part in parts}
        each = seconds / sum(run.steps for run in runs)
        rows.append({"arm": arm.title, "s/step": f"{each:.3g}", **{part: f"{one:.1%}" for part, one in shares.items()}})
    return Section("Time", _table(rows) if rows else "", "Shares of the seconds in steps, all runs of an arm together.")


def _recipes(results: Results) -> Section:
    rows = []
    for name, arm in results.arms.items():
        keys = [Markup("<div><code>{} = {}</code></div>").format(key, _toml(value)) for key, value in arm.keys.items()]
        rows.append({"arm": _name(arm.title), "name": name, "differs in": Markup("").join(keys) or "nothing"})
    return Section("Arms", table(rows), "Keys by which an arm differs from the base recipe.")


def _runs(results: Results) -> Section:
    metric = results.settings["metric"]
    rows = [
        {
            "run": _name(run.name),
            "state": early_end(run) or "finished",
            "steps": run.steps,
            metric: run.figures.get(metric),
            "tokens": run.tokens,
            "seconds": run.seconds,
            "alignment": run.alignment,
        }
        for run in sorted(results.runs, key=lambda run: (list(results.arms).index(run.arm), run.seed))
    ]
    return Section("Runs", table(rows))


def _table(rows: Sequence[Mapping[str, str]]) -> Markup:
    """Of figures as text, which are not to be broken into lines; names of arms may be."""
    return table([{key: _name(value) if key == "arm" else _kept(value) for key, value in row.items()} for row in rows])


def _name(text: str) -> Markup:
    return Markup('<div class="name">{}</div>').format(text)


def _kept(text: str) -> str:
    return text.replace(" ", "\u00a0")


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
