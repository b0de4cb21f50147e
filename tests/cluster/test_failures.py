"""Runs of two ranks from the command line: what they print, who writes, and how they end when something goes wrong."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from qarl.checkpoint import newest_checkpoint
from qarl.tracking.jsonl import read_lines

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SMOKE = str(ROOT / "recipes" / "smoke.toml")
ENDLESS = ("--steps=100000", "--checkpoint.every=5", "--cluster.timeout_s=5")
TIMEOUT_S, GRACE_S = 5, 90
"""`cluster.timeout_s`, and what ending may take besides on a busy machine."""


class Ranks:
    """Two processes with what torchrun would put into their environment."""

    def __init__(self, *arguments: str) -> None:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        self.processes = []
        for rank in (0, 1):
            place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
            environment = os.environ | {name: str(value) for name, value in place.items()} | {"OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-m", "qarl", "train", SMOKE, "--device=cpu", *arguments]
            self.processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        self.leader, self.follower = self.processes

    def until_step(self, step: int) -> None:
        assert self.leader.stdout is not None
        for line in self.leader.stdout:
            if line.startswith(f"step {step}/"):
                return
        pytest.fail(f"ended before step {step}: {self.leader.stderr and self.leader.stderr.read()}")

    def end(self) -> tuple[tuple[int, int], str, str]:
        """Exit codes, the leader's last words, and all that the follower said."""
        _, error = self.leader.communicate(timeout=TIMEOUT_S + GRACE_S)
        said, complained = self.follower.communicate(timeout=TIMEOUT_S + GRACE_S)
        codes = (self.leader.returncode, self.follower.returncode)
        return codes, error.splitlines()[-1] if error else "", said + complained


@pytest.fixture
def ranks() -> Iterator[list[Ranks]]:
    """Those that a test starts, ended after it."""
    started: list[Ranks] = []
    yield started
    for one in started:
        for process in one.processes:
            process.kill()
            process.wait()


def start(ranks: list[Ranks], *arguments: str) -> Ranks:
    ranks.append(Ranks(*arguments))
    return ranks[-1]


def test_a_whole_run_is_told_and_written_once(ranks: list[Ranks], tmp_path: Path) -> None:
    run = start(ranks, "--run-dir", str(tmp_path))
    codes, error, follower = run.end()
    assert (codes, error, follower) == ((0, 0), "", "")
    assert [row["step"] for row in read_lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    assert all(row["mismatch/bit_equal"] == 1.0 for row in read_lines(tmp_path / "metrics.jsonl"))
    assert (tmp_path / "run.log").read_text().count("INFO run folder") == 1


def test_ctrl_c_saves_the_last_step_and_any_number_of_ranks_goes_on(ranks: list[Ranks], tmp_path: Path) -> None:
    run = start(ranks, *ENDLESS, "--run-dir", str(tmp_path))
    run.until_step(7)
    for process in run.processes:
        process.send_signal(signal.SIGINT)
    codes, error, follower = run.end()
    assert (codes, follower) == ((130, 0), "")
    assert "steps, which are saved" in error
    found = newest_checkpoint(tmp_path / "checkpoints")
    assert found is not None and found.step >= 7

    alone = ["--run-dir", str(tmp_path), f"--steps={found.step + 1}", "--checkpoint.every=5"]
    subprocess.run(
        [sys.executable, "-m", "qarl", "train", SMOKE, "--device=cpu", *alone],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    again = start(ranks, "--run-dir", str(tmp_path), f"--steps={found.step + 2}", *ENDLESS[1:])
    assert again.end()[0] == (0, 0)
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(found.step + 2))
    assert all(row["mismatch/bit_equal"] == 1.0 for row in rows)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_lost_follower_ends_the_run_in_time_with_its_name(ranks: list[Ranks], tmp_path: Path, number: int) -> None:
    run = start(ranks, *ENDLESS, "--run-dir", str(tmp_path))
    run.until_step(7)
    lost = run.follower.pid
    run.follower.send_signal(number)
    began = time.monotonic()
    _, error = run.leader.communicate(timeout=TIMEOUT_S + GRACE_S)
    assert time.monotonic() - began < TIMEOUT_S + GRACE_S
    assert run.leader.returncode == 1
    last = error.splitlines()[-1]
    assert last.startswith(f"qarl: rank 1 (process {lost} on ")
    assert "no sign of life" in last and last.endswith("checkpoints/step-5 is the last checkpoint")
    run.follower.kill()

    again = start(ranks, "--run-dir", str(tmp_path), "--steps=8", *ENDLESS[1:])
    assert again.end()[0] == (0, 0)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_follower_does_not_outlive_its_leader(ranks: list[Ranks], tmp_path: Path, number: int) -> None:
    run = start(ranks, *ENDLESS, "--run-dir", str(tmp_path))
    run.until_step(2)
    run.leader.send_signal(number)
    assert run.follower.wait(timeout=TIMEOUT_S + GRACE_S) == 1


def test_torchrun_reports_the_first_cause(tmp_path: Path) -> None:
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "qarl", "train", SMOKE, "--device=cpu"]
    sick = ["--run-dir", str(tmp_path), "--health.truncated={limit = 0.0, steps = 2, action = 'stop'}"]
    found = subprocess.run([sys.executable, *command, *sick], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert found.returncode == 1
    reason = next(line for line in found.stderr.splitlines() if line.startswith("qarl: "))
    assert "stopped after step 2" in reason and "step-2 is the last checkpoint" in reason
    assert f"traceback : {reason.removeprefix('qarl: ')}" in found.stderr
