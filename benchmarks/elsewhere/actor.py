"""What an engine in a process of its own costs: the same steps by one here and by one Ray actor, in turn.

python -m benchmarks.elsewhere.actor recipes/quickstart.toml [--steps 9] [--key=value ...]

Prints a line a part: medians of wall-clock and CPU seconds (of all processes of the program) over all steps but the
first. Tokens and weights of the two must be equal in every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qarl.build import System, build
from qarl.recipe import load_recipe

WAYS = {"in process": "--cluster.engines=0", "one actor": "--cluster.engines=1"}

Seconds = dict[str, list[tuple[float, float]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--steps", type=int, default=9)
    options, overrides = parser.parse_known_args()
    systems = {way: build(load_recipe(options.recipe, [*overrides, engines])) for way, engines in WAYS.items()}
    for system in systems.values():
        system.cast.engine.load(system.cast.learner.publish())
    seconds: dict[str, Seconds] = {way: defaultdict(list) for way in systems}
    for step in range(options.steps):
        made = {way: one_step(system, step, seconds[way]) for way, system in systems.items()}
        assert len(set(made.values())) == 1, f"step {step + 1}: not the same tokens and weights"
    for part in seconds["in process"]:
        medians = {way: [round(median(seconds[way][part][1:], of), 2) for of in (0, 1)] for way in systems}
        print(json.dumps({"part": part, "wall and CPU s": medians}))


def one_step(system: System, step: int, seconds: Seconds) -> str:
    """Rollout, rewards, update and publication; what came out of them, as a text."""
    cast, plan = system.cast, system.plan
    prompts = cast.prompts.take(step, plan.prompts_per_step)
    with measured(seconds["rollout"]):
        groups = cast.engine.generate(prompts, plan.group_size, plan.sampling, (plan.seed, step))
    advantages = cast.advantage([rewards.total for rewards in cast.reward(groups)])
    with measured(seconds["update"]):
        cast.learner.update(groups, advantages)
    with measured(seconds["publish"]):
        snapshot = cast.learner.publish()
        cast.engine.load(snapshot)
    return f"{[one.token_ids.tolist() for group in groups for one in group.completions]} {snapshot.checksum}"


@contextmanager
def measured(seconds: list[tuple[float, float]]) -> Iterator[None]:
    wall, cpu = time.perf_counter(), cpu_seconds()
    yield
    seconds.append((time.perf_counter() - wall, cpu_seconds() - cpu))


def cpu_seconds() -> float:
    """Of this process and all below it that are alive."""
    parents, spent = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except FileNotFoundError:  # ended meanwhile
                continue
            parents[int(entry.name)] = int(fields[1])
            spent[int(entry.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    ours = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return sum(spent[process] for process in ours)


def median(pairs: list[tuple[float, float]], of: int) -> float:
    return statistics.median(pair[of] for pair in pairs)


if __name__ == "__main__":
    main()
