"""How things are timed: medians of whole runs, and the best of many calls where a machine's limit is looked for."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

REPEATS = 5
"""Timed repetitions of which the median is taken, by default; one more before them warms caches and builds kernels."""

BEST_OF_SECONDS = 0.3
"""How long short calls are repeated to find the fastest."""


def repeated_seconds(*works: Callable[[], object], what: str, repeats: int) -> list[list[float]]:
    """Seconds of each work in each of `repeats` repetitions, warm-up left out.

    The works take turns, so that a slow minute of the machine meets all of them.
    """
    seconds: list[list[float]] = [[] for _ in works]
    for index in range(repeats + 1):
        for work, found in zip(works, seconds, strict=True):
            started = time.perf_counter()
            work()
            found.append(time.perf_counter() - started)
        said = " + ".join(f"{found[-1]:.3f}" for found in seconds)
        say(f"{what} {index}: {said} s" + (" (warm-up)" if index == 0 else ""))
    return [found[1:] for found in seconds]


def best_seconds(work: Callable[[], object]) -> float:
    """The fastest of some calls: for a roofline, noise only slows."""
    work()
    best = float("inf")
    deadline = time.perf_counter() + BEST_OF_SECONDS
    while time.perf_counter() < deadline:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def say(text: str) -> None:
    """Progress, apart from the answer."""
    print(text, file=sys.stderr, flush=True)
