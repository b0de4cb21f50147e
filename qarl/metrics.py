"""A number together with how it is reduced, so that merging micro-batches or workers cannot misread it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """A weighted mean kept as its sum and weight; no weight means no value (NaN)."""

    total: float
    weight: float

    def merge(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.weight + other.weight)

    def value(self) -> float:
        return self.total / self.weight if self.weight else math.nan


@dataclass(frozen=True, slots=True)
class Sum:
    total: float

    def merge(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """The largest reading; NaN as soon as one is."""

    peak: float

    def merge(self, other: Max) -> Max:
        return Max(math.nan if math.isnan(self.peak) or math.isnan(other.peak) else max(self.peak, other.peak))

    def value(self) -> float:
        return self.peak


@dataclass(frozen=True, slots=True)
class Last:
    """A reading that is not reduced; of several, the last stands (learning rate, seconds of this step)."""

    reading: float

    def merge(self, other: Last) -> Last:
        return other

    def value(self) -> float:
        return self.reading


@dataclass(frozen=True, slots=True)
class Ess:
    """Effective sample size of importance weights, as a share of their number: (sum w)^2 / (n sum w^2)."""

    total: float
    squares: float
    count: float

    def merge(self, other: Ess) -> Ess:
        return Ess(self.total + other.total, self.squares + other.squares, self.count + other.count)

    def value(self) -> float:
        return self.total**2 / (self.count * self.squares) if self.squares else math.nan


Metric = Mean | Sum | Max | Last | Ess
Metrics = dict[str, Metric]


def merge(parts: Iterable[Mapping[str, Metric]]) -> Metrics:
    """Combine metrics of the same name, each by its own reduction; names need not occur in every part."""
    merged: Metrics = {}
    for part in parts:
        for name, metric in part.items():
            if name in merged:
                assert type(merged[name]) is type(metric), f"{name} has two reductions"
                metric = merged[name].merge(metric)  # type: ignore[arg-type]
            merged[name] = metric
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Plain numbers, sorted by name."""
    return {name: metrics[name].value() for name in sorted(metrics)}
