"""What is compared: a TOML file with a base recipe, seeds, and arms that each change keys of the recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from qarl.config import Config
from qarl.errors import ConfigurationError, suggestion
from qarl.explain import problems
from qarl.recipe import Override, Recipe, overrides_of, parse_recipe, read_toml

ARM_NAME = r"^\w[\w.-]*$"
"""Arms are folders."""


class Experiment(Config):
    """One comparison."""

    recipe: str = Field(min_length=1, description="The base recipe, relative to this file.")
    seeds: tuple[int, ...] = Field(strict=False, min_length=1, description="Every arm is run with each of them.")
    baseline: str | None = Field(
        None, description="The arm from which the others' differences are taken, seed by seed."
    )
    metric: str = Field(description="What arms are ranked by, as in metrics.jsonl or evaluations.jsonl.")
    better: Literal["higher", "lower"] = Field("higher", description="Which values of the metric are the better ones.")
    also: tuple[str, ...] = Field((), strict=False, description="Further metrics to tell and to draw.")
    window: int = Field(10, ge=1, description="Steps whose mean is a reading of a step's metric.")
    targets: tuple[float, ...] = Field((), strict=False, description="Values of `target_metric` to be reached.")
    target_metric: str = Field("reward/mean", description="What has to reach the targets, from below.")
    keep_checkpoints: bool = Field(
        False, description="Keep checkpoints as the recipe says, also of runs that are done."
    )
    arms: dict[str, dict[str, Any]] = Field(min_length=1, description="Recipe keys that an arm changes, and its title.")
    short: dict[str, Any] | None = Field(None, description="Recipe keys, and seeds, of a version that runs in minutes.")

    @field_validator("seeds")
    @classmethod
    def _seeds_are_different(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) != len(seeds) or min(seeds) < 0:
            raise ValueError("seeds are different whole numbers from 0 on; remove what is negative or named twice")
        return seeds

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        complaints = [
            *(_name_complaint(name) for name in self.arms),
            *(_key_complaint(f"arms.{name}", table) for name, table in self.arms.items()),
            _key_complaint("short", self.short or {}),
        ]
        if self.baseline is not None and self.baseline not in self.arms:
            complaints.append(f"baseline = '{self.baseline}' is no arm{suggestion(self.baseline, self.arms)}")
        found = [one for one in complaints if one]
        if found:
            raise ValueError("; ".join(found))
        return self

    @property
    def metrics(self) -> tuple[str, ...]:
        """Everything that is told of a run, the ranking first."""
        return tuple(dict.fromkeys([self.metric, self.target_metric, *self.also]))


@dataclass(frozen=True, slots=True, eq=False)
class Arm:
    """One way to train; `keys` are the dotted recipe keys in which the file makes it differ from the base recipe."""

    name: str
    title: str
    keys: Mapping[str, Any]
    recipes: Mapping[int, Recipe]
    """By seed."""


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """An experiment file, read and checked as a whole; `name` is the file's."""

    name: str
    experiment: Experiment
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


def load_comparison(path: Path, is_short: bool = False) -> Comparison:
    """Read an experiment and the recipe of every run; ConfigurationError has one line for every problem found."""
    table = read_toml(path, "an experiment")
    try:
        experiment = Experiment.model_validate(table)
    except ValidationError as error:
        raise ConfigurationError("\n".join(problems(error, Experiment, lambda key: str(path)))) from None
    short = dict(experiment.short or {}) if is_short else {}
    if is_short and experiment.short is None:
        raise ConfigurationError(f"{path}: has no [short] table, which says what --short is; add one, or leave it out")
    seeds = _short_seeds(experiment, short.pop("seeds", None), path)
    base_path = path.parent / experiment.recipe
    base = read_toml(base_path, "a recipe")
    every_run = [*overrides_of(short, f"table [short] of {path}"), *_saved(experiment)]
    arms, broken = [], []
    for name, changes in experiment.arms.items():
        try:
            arms.append(_arm(name, changes, seeds, every_run, base, base_path, path))
        except ConfigurationError as error:
            broken += [line for line in str(error).split("\n") if line not in broken]
    if broken:
        raise ConfigurationError("\n".join(broken))
    _check_metrics(experiment, arms, path)
    return Comparison(path.stem, experiment, tuple(arms), seeds)


def choose(comparison: Comparison, arms: Sequence[str], seeds: Sequence[str]) -> list[tuple[Arm, int]]:
    """The runs of these arms and seeds, of all where none are named, seed by seed: so an interrupted comparison has
    whole seeds. ConfigurationError for what the experiment has not.
    """
    known = [arm.name for arm in comparison.arms]
    for name in arms:
        if name not in known:
            raise ConfigurationError(
                f"--arms {name}: is no arm of {comparison.name}{suggestion(name, known)}; known: {', '.join(known)}"
            )
    having = list(map(str, comparison.seeds))
    for seed in seeds:
        if seed not in having:
            raise ConfigurationError(f"--seeds {seed}: is no seed of {comparison.name}; known: {', '.join(having)}")
    wanted = [arm for arm in comparison.arms if not arms or arm.name in arms]
    return [(arm, seed) for seed in comparison.seeds if not seeds or str(seed) in seeds for arm in wanted]


def _arm(
    name: str,
    changes: Mapping[str, Any],
    seeds: Sequence[int],
    every_run: Sequence[Override],
    base: dict[str, Any],
    base_path: Path,
    path: Path,
) -> Arm:
    own = {key: value for key, value in changes.items() if key != "title"}
    overrides = overrides_of(own, f"table [arms.{name}] of {path}")
    recipes = {
        seed: parse_recipe(
            base, str(base_path), [*overrides, *every_run, Override(("seed",), seed, f"seeds of {path}")]
        )
        for seed in seeds
    }
    return Arm(name, changes.get("title", name), {one.key: one.value for one in overrides}, recipes)


def _short_seeds(experiment: Experiment, seeds: Any, path: Path) -> tuple[int, ...]:
    if seeds is None:
        return experiment.seeds
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise ConfigurationError(f"{path}: short.seeds = {seeds!r}: must be a list of whole numbers from 0 on")
    return tuple(dict.fromkeys(seeds))


def _saved(experiment: Experiment) -> list[Override]:
    """One checkpoint is what going on needs; many runs with several fill a disk."""
    if experiment.keep_checkpoints:
        return []
    values: dict[str, Any] = {"keep_last": 1, "keep_best": False}
    return [Override(("checkpoint", key), value, "keep_checkpoints = false") for key, value in values.items()]


def _name_complaint(name: str) -> str:
    return "" if re.match(ARM_NAME, name) else f"arms.{name}: an arm's name is a folder's: letters, digits, _, - and ."


def _key_complaint(place: str, table: Mapping[str, Any]) -> str:
    if "seed" in table:
        return f"{place}.seed: seeds are the experiment's; set `seeds`"
    if not isinstance(table.get("title", ""), str):
        return f"{place}.title must be text"
    if place == "short" and "title" in table:
        return "short.title: arms have titles; remove it"
    return ""


def _check_metrics(experiment: Experiment, arms: Sequence[Arm], path: Path) -> None:
    """Of metrics of evaluations it is known before a run which there will be."""
    for arm in arms:
        recipe = next(iter(arm.recipes.values()))
        known = (
            [] if recipe.eval is None else [f"eval/{recipe.eval.name}/{one}" for one in _figures(recipe.eval.samples)]
        )
        for metric in experiment.metrics:
            if metric.startswith("eval/") and metric not in known:
                has = f"known: {', '.join(known)}" if known else "it has no [eval] table"
                raise ConfigurationError(f"{path}: {metric}: arm '{arm.name}' will not measure it; {has}")


def _figures(samples: int) -> list[str]:
    passes = [f"pass@{k}" for k in sorted({1, samples})]
    return [*passes, "reward_mean", "length_mean", "truncated", "errors", "questions"]
