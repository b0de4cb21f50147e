"""Kill training runs again and again, start them again until they end, and compare with runs that nobody killed.

    python -m benchmarks.reliability.kills --runs 50 --report kills.json

A run of the tiny model is killed at a moment drawn uniformly over its life, or before one of the file operations of
its checkpoints, or asked to stop by SIGTERM or SIGINT. At its end the metrics (but those of a clock), held-out
figures, completions, weights and optimizer state must be those of an unbroken run, bit for bit. The report is written
after every run; the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.reliability.runs import (
    CRASHED,
    INTERRUPTED,
    STEPS,
    newest_step,
    outcome,
    run,
    start,
    train_command,
    wait,
    warm_up,
)

VARIANTS: dict[str, tuple[str, ...]] = {
    "w8a8-int8, every step": ("--checkpoint.every=1", "--checkpoint.keep_last=2"),
    "w4a8-int8, Muon, int8 cache": (
        "--scheme=w4a8-int8",
        "--engine.kv_cache=int8",
        "--learner.optimizer.type=muon",
        "--checkpoint.every=2",
        "--checkpoint.keep_last=2",
    ),
    "two updates a batch, KL": (
        "--objective.type=grpo",
        "--objective.kl.coef=0.1",
        "--learner.updates_per_batch=2",
        "--checkpoint.every=1",
        "--checkpoint.keep_last=1",
    ),
    "the best is kept": (
        "--checkpoint.every=2",
        "--checkpoint.keep_last=1",
        "--checkpoint.keep_best=true",
        "--seed=7",
    ),
}
"""What differs between the runs, which take turns."""

KINDS = {"SIGKILL at a moment": 4, "SIGKILL at a file operation": 4, "SIGTERM": 1, "SIGINT": 1}
"""How a run is ended, and how many of ten times so."""

FILE_OPERATIONS_A_SAVE = 40
WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")

MOST_KILLS = 6
"""A run is killed at most so many times, then it may end."""


def main() -> None:
    """Do the runs that the report lacks, then print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "qarl-kills", help="for the runs")
    parser.add_argument("--report", type=Path, default=Path("kills.json"))
    arguments = parser.parse_args()
    done = json.loads(arguments.report.read_text()) if arguments.report.exists() else []
    arguments.folder.mkdir(parents=True, exist_ok=True)
    warm_up()
    unbroken: dict[str, tuple[dict[str, Any], float]] = {}
    for index in range(len(done), arguments.runs):
        variant = list(VARIANTS)[index % len(VARIANTS)]
        if variant not in unbroken:
            unbroken[variant] = _unbroken(arguments.folder / "unbroken", variant)
        rng = random.Random(f"{arguments.seed}/{index}")
        done.append(_killed(arguments.folder / "killed", variant, rng, *unbroken[variant]))
        arguments.report.write_text(json.dumps(done, indent=1))
        print(f"run {index + 1}/{arguments.runs}: {_line(done[-1])}", flush=True)
    print(table(done))
    sys.exit(any(row["lost"] or row["differs"] or row["faults"] for row in done))


def table(rows: list[dict[str, Any]]) -> str:
    """The counts of a report, as a Markdown table."""
    ends = [end for row in rows for end in row["ends"]]
    counts = {
        "runs": len(rows),
        **{f"ended by {kind}": sum(end["kind"] == kind and end["code"] != 0 for end in ends) for kind in KINDS},
        "of these while saving": sum(end["while_saving"] for end in ends),
        "started again": sum(row["restarts"] for row in rows),
        "ended before the signal came": sum(end["code"] == 0 for end in ends),
        "checkpoints lost": sum(row["lost"] for row in rows),
        "different results": sum(bool(row["differs"]) for row in rows),
        "other faults": sum(len(row["faults"]) for row in rows),
    }
    return "\n".join(["| | count |", "| --- | ---: |", *(f"| {name} | {count} |" for name, count in counts.items())])


def _unbroken(folder: Path, variant: str) -> tuple[dict[str, Any], float]:
    """The outcome of a run that nobody kills, and the seconds it lives."""
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    code = run(train_command(folder, *VARIANTS[variant]), folder.with_suffix(".said"))
    assert code == 0, folder.with_suffix(".said").read_text()
    return outcome(folder), time.monotonic() - began


def _killed(
    folder: Path, variant: str, rng: random.Random, expected: Mapping[str, Any], life_s: float
) -> dict[str, Any]:
    """One run, killed and started again until it ends; what happened, and what of it should not have."""
    said = folder.with_suffix(".said")
    shutil.rmtree(folder, ignore_errors=True)
    said.unlink(missing_ok=True)
    ends: list[dict[str, Any]] = []
    lost, faults = 0, []
    for _ in range(rng.randint(1, MOST_KILLS)):
        before, length = newest_step(folder), said.stat().st_size if said.exists() else 0
        end = _end_once(folder, variant, rng, life_s * max(0.3, 1 - before / STEPS))
        words = said.read_bytes()[length:].decode()
        end |= {"before": before, "after": newest_step(folder)}
        ends.append(end)
        # What was announced as saved must be there, and what was there before.
        announced = max([before, *map(int, re.findall(r"^saved .*/step-(\d+)$", words, re.MULTILINE))])
        lost += end["after"] < announced
        faults += _faults(end, words)
        if end["code"] == 0:
            break
    if ends[-1]["code"] != 0 and (code := run(train_command(folder, *VARIANTS[variant]), said)) != 0:
        faults.append(f"the last start ended with code {code}: {said.read_text()[-2000:]}")
        differs = ["unfinished"]
    else:
        found = outcome(folder)
        differs = [name for name in expected if found[name] != expected[name]]
    restarts = len(ends) - (ends[-1]["code"] == 0)
    return {
        "variant": variant,
        "ends": ends,
        "restarts": restarts,
        "lost": lost,
        "differs": differs,
        "faults": faults,
    }


def _end_once(folder: Path, variant: str, rng: random.Random, life_s: float) -> dict[str, Any]:
    """Start the run and end it in one of the ways; its exit code, and whether a save was cut short."""
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    command, said = train_command(folder, *VARIANTS[variant]), folder.with_suffix(".said")
    if kind == "SIGKILL at a file operation":
        operation = rng.randrange(1, 4 * FILE_OPERATIONS_A_SAVE)
        code = wait(start(command, said, lambda: _kill_before(operation, str(folder / "checkpoints"))))
        moment: float = operation
    else:
        number = signal.Signals[kind.split()[0]]
        moment = rng.uniform(0, life_s)
        child = start(command, said)
        time.sleep(moment)
        # A child that has ended waits to be asked for its code, and takes no notice of signals.
        os.kill(child, number)
        code = wait(child)
    unfinished = any(path.name.startswith(".") for path in (folder / "checkpoints").glob("*"))
    return {"kind": kind, "moment": moment, "code": code, "while_saving": unfinished}


def _kill_before(operation: int, folder: str) -> None:
    """This process ends before the n-th file operation below `folder` from now on."""
    seen = 0

    def watch(event: str, details: tuple[object, ...]) -> None:
        nonlocal seen
        if event in WATCHED and folder in str(details[0]):
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def _faults(end: Mapping[str, Any], words: str) -> list[str]:
    """What a run said or returned that it should not have."""
    faults = []
    allowed = {0, INTERRUPTED, -signal.SIGKILL, -signal.SIGTERM}
    if end["code"] == CRASHED or end["code"] not in allowed:
        faults.append(f"{end['kind']}: exit code {end['code']}: {words[-2000:]}")
    saved = re.search(r"interrupted after (\d+) of \d+ steps, which are saved", words)
    if saved is not None and int(saved[1]) != end["after"]:
        faults.append(f"{end['kind']}: said that {saved[1]} steps are saved, but {end['after']} are")
    # The system's own way to die of SIGTERM is right only before the run has begun.
    if end["code"] == -signal.SIGTERM and "run folder" in words:
        faults.append(f"{end['kind']}: ended a run that had begun without saving: {words[-2000:]}")
    return faults


def _line(row: Mapping[str, Any]) -> str:
    kinds = Counter(end["kind"] for end in row["ends"])
    ways = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return f"{row['variant']}: {ways}; lost {row['lost']}, differs {row['differs'] or 'in nothing'}, {row['faults']}"


if __name__ == "__main__":
    main()
