"""Every metric of the runs over their steps, a figure each; what never changes is said in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from qarl.report.figures import Curve, grid, lines, shown, stacked
from qarl.report.history import History
from qarl.report.page import Section
from qarl.run import measured_alignment
from qarl.tracking.picture import points

TOPICS: Mapping[str, tuple[str, ...]] = {
    "Reward": ("reward",),
    "Held-out questions": ("eval",),
    "Completion statistics": ("completion",),
    "Engine and learner": ("mismatch", "correction"),
    "Objective": ("objective", "tbpo"),
    "Optimizer and weights": ("optim", "quant"),
    "Time and speed": ("time", "perf"),
}
"""Sections and the rooms whose metrics stand in them; metrics of other rooms come last, in a section of their own."""

OTHERS = "Other readings"

MEANINGS: Mapping[str, tuple[str, str]] = {
    "reward/mean": ("reward", "mean over the step's completions"),
    "reward/std": ("reward", "deviation within a group, mean over groups"),
    "reward/zero_std_groups": ("share", "groups whose rewards are all equal: they teach nothing"),
    "reward/errors": ("completions", "without a reward"),
    "completion/length_mean": ("tokens", "mean length"),
    "completion/length_max": ("tokens", "longest"),
    "completion/truncated": ("share", "completions cut at the length limit"),
    "completion/empty": ("share", "completions that stop at once"),
    "completion/repetition": ("share", "4-grams that occurred before in their completion"),
    "completion/error_tokens": ("share", "sampled tokens that had a probability below 1e-4"),
    "mismatch/max_abs": ("nats", "largest difference of engine's and learner's log-probability"),
    "mismatch/mean_abs": ("nats", "mean difference of the two log-probabilities"),
    "mismatch/k3": ("nats", "KL from engine to learner, a token"),
    "mismatch/ess": ("share", "effective sample size"),
    "mismatch/mult_prob_error": ("factor", "mean ratio of the two probabilities"),
    "mismatch/bit_equal": ("share", "tokens whose log-probabilities have the same bits"),
    "objective/entropy": ("nats", "mean entropy of a token"),
    "objective/ratio_max": ("ratio", "largest new over old probability"),
    "objective/clipped_low": ("share", "clipped from below"),
    "objective/clipped_high": ("share", "clipped from above"),
    "tbpo/pos_clipped": ("share", "sequences with A > 0, above their band"),
    "tbpo/neg_below": ("share", "sequences with A < 0, below their band"),
    "tbpo/neg_above": ("share", "sequences with A < 0, above their band"),
    "tbpo/mismatch_dropped": ("share", "sequences dropped for mismatch"),
    "optim/grad_norm": ("norm", "gradient before clipping"),
    "optim/lr": ("rate", "learning rate"),
    "quant/codes_flipped": ("share", "codes that a step changed"),
    "perf/rollout_tokens_per_s": ("tokens/s", "speed of the rollout"),
    "perf/bubble": ("share", "slot time of the engine that stood idle"),
    "memory/peak": ("bytes", "most memory held so far"),
}
"""Units and meanings; a metric that is not listed is shown by its name alone."""

UNITS: Mapping[str, str] = {"reward": "reward", "time": "seconds"}
"""Of metrics that are not listed, by their rooms."""

LOGARITHMIC = ("mismatch/max_abs", "mismatch/mean_abs", "mismatch/k3", "optim/grad_norm")

MANY_STEPS = 30
"""From so many on, steps are dots and the line is a running mean."""

NOT_AVERAGED = ("optim/lr", "memory/peak", "eval/")

STEP_AXIS = "step"


@dataclass(frozen=True, slots=True)
class Series:
    """A metric's finite values over the steps of one run, and how many of its values were not finite."""

    steps: list[int]
    values: list[float]
    missing: int


def curves(histories: Sequence[History]) -> list[Section]:
    """The sections that have something to show, in the order of `TOPICS`."""
    names = metric_names(histories)
    topics = {topic: [name for name in names if name.split("/")[0] in rooms] for topic, rooms in TOPICS.items()}
    placed = {name for found in topics.values() for name in found}
    topics[OTHERS] = [name for name in names if name not in placed]
    return [_section(topic, found, histories) for topic, found in topics.items() if found]


def metric_names(histories: Sequence[History]) -> list[str]:
    """Every metric of any run, the known ones first; intervals belong to their figures, evaluations to their file."""
    rows = [row for one in histories for row in (*one.steps, *one.evaluations)]
    names = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
    ranks = {name: rank for rank, name in enumerate(MEANINGS)}
    names = sorted(names, key=lambda name: (ranks.get(name, len(ranks)), "/pass@" not in name))
    return [name for name in names if not (name.startswith("eval/") and name.endswith(("_low", "_high")))]


def series(history: History, name: str) -> Series:
    """Held-out figures are taken from the evaluations, whose steps include the last."""
    steps, values = points(history.evaluations if name.startswith("eval/") else history.steps, name)
    finite = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    return Series([step for step, _ in finite], [value for _, value in finite], len(steps) - len(finite))


def _section(topic: str, names: Sequence[str], histories: Sequence[History]) -> Section:
    figures, constants = [], []
    notes = [_alignment_words(one) for one in histories] if topic == "Engine and learner" else []
    zeros: list[str] = []
    if topic == "Time and speed":
        figures += [_time_figure(one, len(histories) > 1) for one in histories if len(one.steps) > 1]
        names = [name for name in names if not name.startswith("time/") or name == "time/step"]
    for name in names:
        found = {one.name: series(one, name) for one in histories}
        missing = sum(one.missing for one in found.values())
        if missing:
            notes.append(f"{name} was not finite in {_steps(missing)}.")
        constant = _constant(found)
        if constant is not None:
            constants.append((name, constant))
        elif any(one.values for one in found.values()):
            figures.append(_figure(name, found, histories))
            zeros += _zeros(name, found)
    if zeros:
        notes.append(f"Zeros are gaps on a logarithmic axis: {', '.join(zeros)}.")
    return Section(topic, grid(figures) + _constants(constants), " ".join(notes))


def _figure(name: str, found: Mapping[str, Series], histories: Sequence[History]) -> Markup:
    unit, meaning = MEANINGS.get(name, ("", ""))
    unit = unit or UNITS.get(name.split("/")[0], "")
    most = max(len(one.values) for one in found.values())
    smooth = 0 if most < MANY_STEPS or name.startswith(NOT_AVERAGED) else max(5, most // 20)
    title = name + (f": {meaning}" if meaning else "") + (f"; line: mean of {smooth} steps" if smooth else "")
    drawn = [_curve(one, name, found[one.name]) for one in histories]
    return lines(title, STEP_AXIS, unit, drawn, smooth=smooth, log=name in LOGARITHMIC)


def _zeros(name: str, found: Mapping[str, Series]) -> list[str]:
    """What a logarithmic axis cannot show, run by run."""
    counts = {run: sum(value <= 0.0 for value in one.values) for run, one in found.items()}
    return [
        f"{run} {name} ({count} of {_steps(len(found[run].values))})"
        for run, count in counts.items()
        if count and name in LOGARITHMIC
    ]


def _curve(history: History, name: str, found: Series) -> Curve:
    """With the interval of a held-out share, where it has one."""
    low, high = (series(history, f"{name}_{side}") for side in ("low", "high"))
    if name.startswith("eval/") and low.steps == high.steps == found.steps:
        return Curve(history.name, found.steps, found.values, low.values, high.values)
    return Curve(history.name, found.steps, found.values)


def _time_figure(history: History, is_one_of_several: bool) -> Markup:
    """Seconds of every part of a step; what `time/step` holds beside them is `other`."""
    names = [name for name in metric_names([history]) if name.startswith("time/") and name != "time/step"]
    rows = [row for row in history.steps if row.get("time/step") is not None]
    parts = {name.removeprefix("time/"): [row.get(name) or 0.0 for row in rows] for name in names}
    sums = [sum(values) for values in zip(*parts.values(), strict=True)] if parts else [0.0] * len(rows)
    parts["other"] = [max(0.0, row["time/step"] - known) for row, known in zip(rows, sums, strict=True)]
    steps = [row["step"] for row in rows]
    title = "time/*: seconds of a step by its parts" + (f", {history.name}" if is_one_of_several else "")
    return stacked(title, STEP_AXIS, "seconds", [Curve(name, steps, values) for name, values in parts.items()])


def _constant(found: Mapping[str, Series]) -> float | None:
    """The one value that all runs had in all steps, if it is one; of a single reading there is no curve either."""
    values = {value for one in found.values() for value in one.values}
    return values.pop() if len(values) == 1 else None


def _constants(constants: Sequence[tuple[str, float]]) -> Markup:
    if not constants:
        return Markup("")
    said = Markup(", ").join(
        Markup('<span title="{}"><code>{}</code> {}</span>').format(MEANINGS.get(name, ("", ""))[1], name, shown(value))
        for name, value in constants
    )
    return Markup("<p>The same in every step: {}.</p>").format(said)


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def _alignment_words(history: History) -> str:
    measured = measured_alignment(history.steps)
    count = len(history.steps)
    said = (
        f"engine and learner were bit-equal in {f'all {count} steps' if count > 1 else 'its step'}"
        if measured == "exact"
        else measured
    )
    return f"{history.name}: {said}."
