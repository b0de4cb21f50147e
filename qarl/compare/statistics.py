"""Means over seeds with their intervals, differences to a baseline, and when a curve reaches a value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
"""Of the intervals, under the assumption of Student's t: seeds are independent, their figures about normal."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean of `count` readings, and half the width of its interval: None of a single reading, which has none."""

    mean: float
    half_width: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How many of `count` runs arrived, and the median of those which did: None where none did."""

    arrived: int
    count: int
    median: float | None


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean and t-interval of independent readings; None of no reading."""
    count = len(values)
    if not count:
        return None
    mean = math.fsum(values) / count
    if count == 1:
        return Estimate(mean, None, 1)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    return Estimate(mean, t_quantile(count - 1) * math.sqrt(variance / count), count)


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """The mean of the differences to the baseline's readings of the same seed; None without a common seed."""
    return estimate([values[seed] - baseline[seed] for seed in values if seed in baseline])


def arrivals(values: Sequence[float | None]) -> Arrivals:
    """Of readings of every run; None is of one that has not arrived."""
    arrived = sorted(value for value in values if value is not None)
    if not arrived:
        return Arrivals(0, len(values), None)
    middle = len(arrived) // 2
    median = arrived[middle] if len(arrived) % 2 else (arrived[middle - 1] + arrived[middle]) / 2
    return Arrivals(len(arrived), len(values), median)


def running_means(values: Sequence[float | None], window: int) -> list[float | None]:
    """The mean of each `window` values up to this one; None before there are so many, and where all are gaps (None)."""
    means: list[float | None] = []
    for end in range(1, len(values) + 1):
        present = [value for value in values[end - window : end] if value is not None] if end >= window else []
        means.append(math.fsum(present) / len(present) if present else None)
    return means


def first_at_least(values: Sequence[float | None], target: float) -> int | None:
    """The index of the first value at or above the target; None where there is none."""
    return next((index for index, value in enumerate(values) if value is not None and value >= target), None)


def t_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t that Student's variable with so many degrees of freedom exceeds in absolute value with 1 - `confidence`.

    By bisection, to 12 digits: the distribution has a closed form (Abramowitz & Stegun, 26.7.3 and 26.7.4).
    """
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """The chance that Student's variable lies within -t and t."""
    angle = math.atan(t / math.sqrt(freedom))
    is_odd = freedom % 2 == 1
    # Odd: cos + 2/3 cos^3 + 2*4/(3*5) cos^5 + ...; even: 1 + 1/2 cos^2 + 1*3/(2*4) cos^4 + ...; up to cos^(freedom-2).
    term, total = (math.cos(angle), 0.0) if is_odd else (1.0, 0.0)
    for power in range(1 if is_odd else 0, freedom - 1, 2):
        total += term
        term *= (power + 1) / (power + 2) * math.cos(angle) ** 2
    return 2.0 / math.pi * (angle + math.sin(angle) * total) if is_odd else math.sin(angle) * total
