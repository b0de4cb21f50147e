"""Runs that are stopped or killed, wherever that happens, end as if nothing had happened: same figures, same bits."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from qarl.checkpoint import newest_checkpoint
from qarl.cli import run_command
from qarl.tracking.jsonl import read_lines

ROOT = Path(__file__).resolve().parents[2]
SMOKE = str(ROOT / "recipes" / "smoke.toml")

SMALL = ("--prompts_per_step=2", "--sampling.max_new_tokens=8", "--eval.count=4", "--eval.every=2")

KILLED_BEFORE = (5, 20, 35, 50, 65, 80)
"""File operations below `checkpoints/`, counted anew every time; one save is some thirty of them."""

KILLING = """
# Trains again and again, in children that are killed; prints how each ended and which checkpoint there was then.
import os, signal, sys
from pathlib import Path
import torch
import qarl.run
from qarl.build import build
from qarl.checkpoint import newest_checkpoint
from qarl.cli import run_command
from qarl.recipe import load_recipe

folder, operations, *arguments = sys.argv[1:]
torch.set_num_threads(1)  # children inherit no other threads
build(load_recipe(Path(arguments[1])))  # imports what every child needs

def train_until(operation):
    seen = 0
    def kill(event, details):
        nonlocal seen
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and folder in str(details[0]):
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(kill)
    os._exit(run_command(arguments))

for operation in operations.split(","):
    child = os.fork()
    if child == 0:
        train_until(int(operation))
    _, status = os.waitpid(child, 0)
    found = newest_checkpoint(Path(folder))
    print("KILLED", os.waitstatus_to_exitcode(status) == -signal.SIGKILL, found.step if found else 0, flush=True)
"""


def command_for(folder: Path, *overrides: str) -> list[str]:
    return ["train", SMOKE, "--run-dir", str(folder), *SMALL, *overrides]


def outcome(folder: Path) -> dict[str, Any]:
    """What a run has to show, but for what a clock makes: figures, completions and the bytes of its last weights."""
    rows = read_lines(folder / "metrics.jsonl")
    last = newest_checkpoint(folder / "checkpoints")
    assert last is not None
    return {
        "metrics": [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "memory/"))} for row in rows],
        "evaluations": read_lines(folder / "evaluations.jsonl"),
        "completions": {path.name: path.read_text() for path in (folder / "completions").iterdir()},
        "tensors": {path.name: path.read_bytes() for path in last.folder.rglob("*.safetensors")},
        "learner": (last.folder / "learner.json").read_text(),
    }


def test_a_run_stopped_by_ctrl_c_goes_on_exactly(tmp_path: Path) -> None:
    # Without an end, so that the signal cannot come too late; then it is given one.
    endless = command_for(tmp_path / "stopped", "--steps=100000", "--checkpoint.every=100000")
    process = subprocess.Popen(
        [sys.executable, "-m", "qarl", *endless], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "steps, which are saved" in error.splitlines()[-1]
    found = newest_checkpoint(tmp_path / "stopped" / "checkpoints")
    assert found is not None and found.step >= 3

    steps = f"--steps={found.step + 3}"
    assert run_command(command_for(tmp_path / "stopped", steps)) == 0
    assert run_command(command_for(tmp_path / "unbroken", steps)) == 0
    unbroken = outcome(tmp_path / "unbroken")
    assert outcome(tmp_path / "stopped") == unbroken
    assert len(unbroken["metrics"]) == len(unbroken["completions"]) == found.step + 3


def test_a_run_of_adapters_goes_on_exactly_and_is_evaluated_as_it_was(tmp_path: Path) -> None:
    options = ("--learner.lora.rank=4", "--steps=4")
    assert run_command(command_for(tmp_path / "stopped", *options, "--steps=2")) == 0
    assert run_command(command_for(tmp_path / "stopped", *options)) == 0
    assert run_command(command_for(tmp_path / "unbroken", *options)) == 0
    unbroken = outcome(tmp_path / "unbroken")
    assert set(unbroken["tensors"]) == {"adapter_model.safetensors", "optimizer.safetensors"}
    assert [row["mismatch/bit_equal"] for row in unbroken["metrics"]] == [1.0] * 4
    stopped = outcome(tmp_path / "stopped")
    # The shorter run also measured its end.
    stopped["evaluations"] = list({row["step"]: row for row in stopped["evaluations"]}.values())
    assert stopped == unbroken


def test_a_run_killed_while_saving_again_and_again_goes_on_exactly(tmp_path: Path) -> None:
    sizes = ("--steps=6", "--checkpoint.every=1", "--checkpoint.keep_last=1")
    killed = command_for(tmp_path / "killed", *sizes)
    operations = ",".join(map(str, KILLED_BEFORE))
    command = [sys.executable, "-c", KILLING, str(tmp_path / "killed" / "checkpoints"), operations, *killed]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    ends = [line.split()[1:] for line in process.stdout.splitlines() if line.startswith("KILLED")]
    assert [was_killed for was_killed, _ in ends] == ["True"] * len(KILLED_BEFORE)
    reached = [int(step) for _, step in ends]
    assert reached[0] == 0 and reached == sorted(reached) and reached[-1] < 6
    assert len(set(reached)) >= 3

    assert run_command(killed) == 0
    assert run_command(command_for(tmp_path / "unbroken", *sizes)) == 0
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "unbroken")
    assert sorted(path.name for path in (tmp_path / "killed" / "checkpoints").iterdir()) == ["latest", "step-6"]
