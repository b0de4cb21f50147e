"""What a comparison came to: of every run its state, figures, evaluations and curves, in one file that can be kept."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from qarl.compare.experiment import Arm, Comparison, Experiment
from qarl.compare.jobs import Job, State
from qarl.compare.statistics import first_at_least, running_means
from qarl.config import Config
from qarl.errors import ConfigurationError
from qarl.explain import problems
from qarl.run import measured_alignment
from qarl.tracking.jsonl import EVALUATIONS_FILE, METRICS_FILE, read_lines

CURVE_POINTS = 100
"""A longer run's curve has means of equally many steps in a row instead of steps."""

DIGITS = 4
"""Significant ones, of every figure that is kept."""

ALWAYS_DRAWN = ("reward/mean",)

SETTINGS = ("baseline", "metric", "better", "also", "window", "targets", "target_metric")
"""Keys of an experiment by which figures are made."""

Row = Mapping[str, Any]


class Arrival(Config):
    """What had been spent when a target was reached."""

    steps: int
    tokens: int = Field(description="Sampled by the engine for training.")
    seconds: float = Field(description="Of steps, without evaluations and checkpoints.")


class RunResult(Config):
    """One run; metrics it has no reading of are absent."""

    arm: str
    seed: int
    state: State
    reason: str
    steps: int
    planned: int
    tokens: int
    seconds: float
    alignment: str
    figures: dict[str, float]
    evaluations: list[dict[str, int | float | None]]
    arrivals: list[Arrival | None] = Field(description="At each of the targets.")
    curves: dict[str, list[int | float | None]] = Field(description="Over `step`, finished steps.")
    parts: dict[str, float] = Field(description="Seconds of rollout, learner, ...")

    @property
    def name(self) -> str:
        return f"{self.arm}/seed-{self.seed}"

    @property
    def has_begun(self) -> bool:
        return self.state != "unfinished" or self.steps > 0

    @property
    def counts(self) -> bool:
        """Whether its last readings are a result: it ended, well or badly, and trained at all."""
        return self.state != "unfinished" and self.steps > 0

    def last_evaluated(self, metric: str) -> int | None:
        """After how many steps the last reading of a metric of evaluations was taken."""
        return next((int(row["step"] or 0) for row in reversed(self.evaluations) if row.get(metric) is not None), None)


class ArmResult(Config):
    """An arm's title, and the dotted recipe keys in which it differs from the base recipe."""

    title: str
    keys: dict[str, Any]


class Results(Config):
    """A comparison's results; `settings` are those of the experiment's keys by which figures are made."""

    name: str
    settings: dict[str, Any]
    arms: dict[str, ArmResult]
    seeds: list[int]
    runs: list[RunResult]

    @classmethod
    def of(cls, name: str, comparison: Comparison, runs: Sequence[RunResult]) -> Self:
        return cls(
            name=name,
            settings=_settings(comparison.experiment),
            arms={arm.name: _arm_result(arm) for arm in comparison.arms},
            seeds=list(comparison.seeds),
            runs=list(runs),
        )

    @property
    def metrics(self) -> list[str]:
        """Everything that is told of a run, the ranking first."""
        settings = self.settings
        return list(dict.fromkeys([settings["metric"], settings["target_metric"], *settings["also"]]))

    def runs_of(self, arm: str) -> list[RunResult]:
        """Those that count, by seed."""
        return [run for run in self.runs if run.arm == arm and run.counts]

    def values(self, arm: str, metric: str) -> dict[int, float]:
        """The arm's figures by seed."""
        return {run.seed: run.figures[metric] for run in self.runs_of(arm) if metric in run.figures}

    def to_json(self) -> str:
        """A line for every run, so that a change of one is a change of one line."""
        head = self.model_dump(mode="json", exclude={"runs"})
        lines = ",\n".join("  " + json.dumps(run.model_dump(mode="json"), separators=(",", ":")) for run in self.runs)
        return json.dumps(head, indent=1)[:-2] + ',\n "runs": [\n' + lines + "\n ]\n}\n"


def read_results(path: Path, comparison: Comparison) -> Results:
    """Results that were kept; ConfigurationError where they are none of this experiment as it is now."""
    try:
        results = Results.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"--from {path}: cannot be read ({error.strerror}); give a results.json") from error
    except ValidationError as error:
        raise ConfigurationError("\n".join(problems(error, Results, lambda key: f"--from {path}"))) from None
    now = Results.of(results.name, comparison, results.runs)
    changed = [key for key in SETTINGS if results.settings.get(key) != now.settings[key]]
    changed += [f"arms.{name}" for name in now.arms if name not in results.arms or _differ(name, results, now)]
    changed += [f"arms.{name}" for name in results.arms if name not in now.arms]
    if changed:
        raise ConfigurationError(
            f"--from {path}: the results are of an experiment with other {', '.join(changed)}; put them back, or make "
            "results anew from the runs' folders, with --no-run and without --from"
        )
    return now


def measure(job: Job, experiment: Experiment) -> RunResult:
    """Read a run's folder."""
    steps = read_lines(job.folder.path / METRICS_FILE)
    evaluations = read_lines(job.folder.path / EVALUATIONS_FILE)
    outcome = job.outcome()
    tokens = list(accumulate((_tokens(row) for row in steps), initial=0))
    seconds = list(accumulate((row.get("time/step") or 0.0 for row in steps), initial=0.0))
    kept = [name for name in experiment.metrics if name.startswith("eval/")]
    return RunResult(
        arm=job.arm.name,
        seed=job.seed,
        state=outcome.state,
        reason=outcome.reason,
        steps=len(steps),
        planned=job.recipe.steps,
        tokens=tokens[-1],
        seconds=_short(seconds[-1]),
        alignment=measured_alignment(steps),
        figures=_figures(steps, evaluations, experiment),
        evaluations=[
            {"step": row["step"], **{name: _short(row[name]) for name in kept if name in row}} for row in evaluations
        ],
        arrivals=[
            None if done is None else Arrival(steps=done, tokens=tokens[done], seconds=_short(seconds[done]))
            for done in (_arrived(steps, evaluations, experiment, target) for target in experiment.targets)
        ],
        curves=_curves(steps, [*experiment.metrics, *ALWAYS_DRAWN], job.recipe.steps),
        parts=_parts(steps),
    )


def _settings(experiment: Experiment) -> dict[str, Any]:
    return experiment.model_dump(mode="json", include=set(SETTINGS))


def _arm_result(arm: Arm) -> ArmResult:
    return ArmResult(title=arm.title, keys=dict(arm.keys))


def _differ(name: str, results: Results, now: Results) -> bool:
    return results.arms[name].keys != now.arms[name].keys


def _tokens(row: Row) -> int:
    """Tokens sampled in a step: the rollout's speed is their number by its seconds."""
    speed, seconds = row.get("perf/rollout_tokens_per_s"), row.get("time/rollout")
    return 0 if speed is None or seconds is None else int(speed * seconds + 0.5)


def _figures(steps: Sequence[Row], evaluations: Sequence[Row], experiment: Experiment) -> dict[str, float]:
    """The last evaluation's reading, or the mean over the last `window` steps."""
    figures = {}
    for name in experiment.metrics:
        rows, count = (evaluations, 1) if name.startswith("eval/") else (steps, experiment.window)
        readings = [row[name] for row in rows if name in row][-count:]
        present = [value for value in readings if value is not None]
        if present:
            figures[name] = _number(math.fsum(present) / len(present))
    return figures


def _arrived(steps: Sequence[Row], evaluations: Sequence[Row], experiment: Experiment, target: float) -> int | None:
    """Finished steps when the target was reached; None where it was not."""
    name = experiment.target_metric
    if name.startswith("eval/"):
        found = first_at_least([row.get(name) for row in evaluations], target)
        return None if found is None else min(int(evaluations[found]["step"]), len(steps))
    found = first_at_least(running_means([row.get(name) for row in steps], experiment.window), target)
    return None if found is None else found + 1


def _curves(steps: Sequence[Row], names: Sequence[str], planned: int) -> dict[str, list[int | float | None]]:
    width = math.ceil(planned / CURVE_POINTS)  # the same for all seeds of an arm, also those that ended early
    pieces = [steps[start : start + width] for start in range(0, len(steps), width)]
    of_steps = [name for name in dict.fromkeys(names) if not name.startswith("eval/")]
    present = [name for name in of_steps if any(name in row for row in steps)]
    curves: dict[str, list[int | float | None]] = {"step": [piece[-1]["step"] + 1 for piece in pieces]}
    for name in present:
        curves[name] = [_mean([row[name] for row in piece if row.get(name) is not None]) for piece in pieces]
    return curves


def _parts(steps: Sequence[Row]) -> dict[str, float]:
    """Seconds of every part of the steps, and of what lies between them, `other`."""
    names = list(dict.fromkeys(name for row in steps for name in row if name.startswith("time/")))
    sums = {name.removeprefix("time/"): math.fsum(row.get(name) or 0.0 for row in steps) for name in names}
    total = sums.pop("step", 0.0)
    sums["other"] = max(0.0, total - math.fsum(sums.values()))
    return {name: _number(value) for name, value in sums.items()}


def _mean(values: Sequence[float]) -> float | None:
    return _short(math.fsum(values) / len(values)) if values else None


def _number(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _short(value: float | None) -> Any:
    return None if value is None else _number(value)
