"""An experiment of the tiny model, and a program that stands for `qarl train`: it ends as its seed and arm say."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from qarl.compare.experiment import Comparison, load_comparison
from qarl.compare.jobs import Job
from qarl.compare.results import Results, RunResult
from qarl.tracking.jsonl import json_line

SMOKE = Path(__file__).resolve().parents[2] / "recipes" / "smoke.toml"

EXPERIMENT = f"""
recipe = "{SMOKE}"
seeds = [0, 1]
baseline = "plain"
metric = "eval/held_out/pass@1"
window = 2
targets = [0.5]
also = ["mismatch/mean_abs"]
[arms.plain]
title = "full precision, GRPO"
scheme = "none"
objective = {{type = "grpo"}}
[arms.tbpo]
learner.lr = 1e-4
[short]
seeds = [7]
steps = 3
"""

STAND_IN = """
import os, signal, sys, time
from pathlib import Path
folder, way = Path(sys.argv[1]), sys.argv[2]
(folder / "checkpoints" / "step-1").mkdir(parents=True, exist_ok=True)
def save(number, frame):
    (folder / "saved").write_text(str(number))
    sys.exit(130)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, save)
(folder / "begun").touch()
if way == "waits":
    time.sleep(60)
if way == "deaf":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    (folder / "deaf.tmp").write_text(str(os.getpid()))
    (folder / "deaf.tmp").rename(folder / "deaf")
    time.sleep(60)
if way == "stops":
    print("step 1/5  reward 0.1")
    print(f"qarl: stopped after step 1: answers are empty; {folder}/checkpoints/step-1 is the last checkpoint")
    sys.exit(1)
if way == "fails":
    print("qarl: nowhere.py does not exist; check the path")
    sys.exit(2)
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    path = tmp_path / "trial.toml"
    path.write_text(EXPERIMENT)
    return path


@pytest.fixture
def comparison(experiment: Path) -> Comparison:
    return load_comparison(experiment)


def stand_in(ways: Mapping[str, str]) -> Callable[[Job], list[str]]:
    """A command that ends at once and well, but for the jobs named."""
    return lambda job: [sys.executable, "-S", "-c", STAND_IN, str(job.folder.path), ways.get(job.name, "ends")]


def write_files(
    folder: Path, steps: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]] = ()
) -> None:
    """What a run measured; steps are counted from 0."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"step": step, **row} for step, row in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("".join(map(json_line, rows)))
    (folder / "evaluations.jsonl").write_text("".join(map(json_line, evaluations)))


def result(arm: str, seed: int, accuracy: float | None, **given: Any) -> RunResult:
    """A finished run of four steps."""
    figures = {} if accuracy is None else {"eval/held_out/pass@1": accuracy}
    values: dict[str, Any] = {
        "state": "finished",
        "reason": "",
        "steps": 4,
        "planned": 4,
        "tokens": 400,
        "seconds": 8.0,
        "alignment": "exact",
        "figures": figures,
        "evaluations": [{"step": 0, "eval/held_out/pass@1": 0.1}, {"step": 4, "eval/held_out/pass@1": accuracy}],
        "arrivals": [None],
        "curves": {"step": [1, 2, 3, 4], "reward/mean": [0.0, 0.2, 0.4, 0.6]},
        "parts": {"rollout": 6.0, "learner": 1.5, "other": 0.5},
    }
    return RunResult(arm=arm, seed=seed, **{**values, **given})


def results_of(comparison: Comparison, *runs: RunResult) -> Results:
    return Results.of("trial", comparison, runs)
