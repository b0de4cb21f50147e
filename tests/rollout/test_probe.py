"""Two processes that are to agree to the bit say the same of themselves; kernels that differ are told apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qarl.ops.kernels import kernels, using
from qarl.ops.reference import ReferenceKernels
from qarl.rollout.config import NativeEngineConfig
from qarl.rollout.probe import differences, identity

ROOT = Path(__file__).resolve().parents[2]

needs_c = pytest.mark.skipif(kernels().name != "cpu", reason="needs the C kernels")


def sampled(found: dict[str, str]) -> str:
    return next(value for name, value in found.items() if name.startswith("log-probabilities"))


@needs_c
def test_another_process_on_this_machine_says_the_same() -> None:
    script = (
        "import json; from qarl.rollout.probe import *; from qarl.rollout.config import *; "
        "print(json.dumps(identity(NativeEngineConfig(), 'w8a8-int8')))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    ours = identity(NativeEngineConfig(), "w8a8-int8")
    assert eval(done.stdout) == ours
    assert differences(ours, eval(done.stdout)) == []
    assert {"qarl", "torch", "kernels", "integer instructions", "vector width", "compiled kernels"} < set(ours)


@needs_c
def test_other_kernels_are_told_apart_by_name_and_by_what_they_compute() -> None:
    ours = identity(NativeEngineConfig(), "none")
    with using(ReferenceKernels()):
        theirs = identity(NativeEngineConfig(), "none")
    assert sampled(ours) != sampled(theirs)
    found = differences(ours, theirs)
    assert "kernels: cpu here, reference there" in found
    assert any(line.startswith("compiled kernels: ") and line.endswith(", none there") for line in found)


def test_what_the_engine_is_told_changes_the_probe() -> None:
    plain = sampled(identity(NativeEngineConfig(), "w8a8-int8"))
    assert sampled(identity(NativeEngineConfig(max_concurrency=1), "w8a8-int8")) == plain
    assert sampled(identity(NativeEngineConfig(kv_cache="int8"), "w8a8-int8")) != plain
    assert sampled(identity(NativeEngineConfig(), "none")) != plain
