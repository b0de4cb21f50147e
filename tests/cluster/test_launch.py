"""Whether there are others, which one this is, and what torchrun is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qarl.cluster.config import ClusterConfig
from qarl.cluster.launch import is_follower, is_launched, leading, record


@pytest.mark.parametrize(
    ("environment", "launched", "follows"),
    [
        ({}, False, False),
        ({"WORLD_SIZE": "1", "RANK": "0"}, False, False),
        ({"WORLD_SIZE": "2", "RANK": "0"}, True, False),
        ({"WORLD_SIZE": "2", "RANK": "1"}, True, True),
    ],
)
def test_torchrun_says_so_in_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], launched: bool, follows: bool
) -> None:
    for name in ("WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (is_launched(), is_follower()) == (launched, follows)


def test_one_process_leads_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with leading("", ClusterConfig()) as crew:
        assert crew is None


@pytest.mark.parametrize("ranks", ["1", "2"])
def test_what_waits_for_the_exit_is_done(ranks: str) -> None:
    code = "import atexit; from qarl.cluster.launch import end; atexit.register(print, 'ended'); end(3)"
    found = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"WORLD_SIZE": ranks}, capture_output=True, text=True
    )
    assert (found.stdout, found.returncode) == ("ended\n", 3)


def test_the_cause_is_left_where_torchrun_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    record("rank 1: out of memory")
    found = json.loads(file.read_text())
    assert found["message"] == "rank 1: out of memory"
    assert isinstance(found["timestamp"], int)

    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    record("to nobody")
