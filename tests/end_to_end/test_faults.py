"""What goes wrong around a run: a clock that is set back, a second run in its folder, and kills without number."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from qarl.cli import run_command
from qarl.runfolder import RunLock
from qarl.tracking.jsonl import read_lines

ROOT = Path(__file__).resolve().parents[2]
SMOKE = str(ROOT / "recipes" / "smoke.toml")
SMALL = ("--steps=4", "--prompts_per_step=2", "--sampling.max_new_tokens=8", "--eval.count=4", "--checkpoint.every=1")

OF_A_CLOCK = ("time/", "perf/", "memory/")


def train(folder: Path, *options: str) -> int:
    return run_command(["train", SMOKE, "--run-dir", str(folder), *SMALL, *options])


def outcome(folder: Path) -> dict[str, Any]:
    """Figures that owe nothing to a clock, completions, and the bytes of the last checkpoint's files."""
    rows = read_lines(folder / "metrics.jsonl")
    last = folder / "checkpoints" / "step-4"
    return {
        "metrics": [{k: v for k, v in row.items() if not k.startswith(OF_A_CLOCK)} for row in rows],
        "completions": {path.name: path.read_text() for path in (folder / "completions").iterdir()},
        "files": {path.name: path.read_bytes() for path in last.rglob("*") if path.is_file()},
    }


def test_a_clock_that_jumps_back_and_forth_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(tmp_path / "steady") == 0
    rng = random.Random(0)
    asked = []

    def jumping() -> float:
        asked.append(rng.uniform(0, 4e9))
        return asked[-1]

    with monkeypatch.context() as patch:
        patch.setattr(time, "time", jumping)
        # Stopped and resumed, so that what was written later bears an earlier time.
        assert train(tmp_path / "jumping", "--steps=2") == 0
        assert train(tmp_path / "jumping") == 0
    assert asked, "nobody looked at the clock"
    assert outcome(tmp_path / "jumping") == outcome(tmp_path / "steady")


def test_a_second_run_in_a_folder_is_refused_in_one_line_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert train(folder, "--steps=1") == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"}
    capsys.readouterr()
    with RunLock(folder):
        assert train(folder) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "is in use by process" in error and "--run-dir" in error
    after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "run.lock"}
    assert after == before


@pytest.mark.slow
def test_runs_killed_anywhere_end_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """The short form of the program that does it at length; see docs/reliability.md."""
    report = tmp_path / "kills.json"
    command = [sys.executable, "-m", "benchmarks.reliability.kills", "--runs=3", f"--folder={tmp_path}"]
    done = subprocess.run([*command, f"--report={report}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(report.read_text())
    assert len(rows) == 3 and sum(len(row["ends"]) for row in rows) >= 3
    assert [(row["lost"], row["differs"], row["faults"]) for row in rows] == [(0, [], [])] * 3
