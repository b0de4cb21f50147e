"""The three arms of an experiment are one recipe with other switches: same questions, same draws, own arithmetic."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qarl.cli import run_command
from qarl.ops.kernels import kernels
from qarl.tracking.jsonl import read_lines

SMOKE = str(Path(__file__).resolve().parents[2] / "recipes" / "smoke.toml")

ARMS = {
    "full precision": ("--scheme=none",),
    "quantized rollout, unaligned": ("--scheme=w8a8-int8", "--alignment=none"),
    "aligned": ("--scheme=w8a8-int8",),
}


@dataclass(frozen=True)
class Arm:
    """What a run left: one row of metrics a step, and the first step's completions."""

    metrics: list[dict[str, Any]]
    first: list[dict[str, Any]]

    def firsts(self, column: str) -> list[Any]:
        return [row[column] for row in self.first]


@pytest.fixture(scope="module")
def arms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Arm]:
    found = {}
    for name, switches in ARMS.items():
        folder = tmp_path_factory.mktemp("arm")
        assert run_command(["train", SMOKE, "--run-dir", str(folder), "--steps=3", "--eval.count=2", *switches]) == 0
        first = [json.loads(line) for line in (folder / "completions" / "step-0.jsonl").read_text().splitlines()]
        found[name] = Arm(read_lines(folder / "metrics.jsonl"), first)
    return found


def test_every_arm_is_asked_the_same_questions(arms: dict[str, Arm]) -> None:
    full, unaligned, aligned = arms.values()
    assert len(set(full.firsts("prompt"))) == 4
    assert full.firsts("prompt") == unaligned.firsts("prompt") == aligned.firsts("prompt")
    assert full.firsts("prompt_id") == unaligned.firsts("prompt_id") == aligned.firsts("prompt_id")


def test_arms_with_the_same_engine_begin_with_the_same_completions(arms: dict[str, Arm]) -> None:
    full, unaligned, aligned = arms.values()
    assert unaligned.first == aligned.first
    assert full.firsts("engine_logprobs") != aligned.firsts("engine_logprobs")


def test_only_the_unaligned_arm_disagrees_with_its_engine(arms: dict[str, Arm]) -> None:
    if not kernels().exact_matmul:
        pytest.skip("`exact` needs the C kernels")
    full, unaligned, aligned = ([row["mismatch/max_abs"] for row in arm.metrics] for arm in arms.values())
    assert full == aligned == [0.0, 0.0, 0.0]
    assert len(unaligned) == 3 and min(unaligned) > 0.0
    assert all(row["mismatch/bit_equal"] < 0.1 for row in arms["quantized rollout, unaligned"].metrics)


def test_arms_learn_apart(arms: dict[str, Arm]) -> None:
    losses = [[row["optim/grad_norm"] for row in arm.metrics] for arm in arms.values()]
    assert losses[0] != losses[1] != losses[2] != losses[0]
    assert all(norm > 0.0 for arm in losses for norm in arm)


def test_full_precision_has_no_codes_to_flip(arms: dict[str, Arm]) -> None:
    assert all(row["quant/codes_flipped"] is None for row in arms["full precision"].metrics)
    assert all(row["quant/codes_flipped"] > 0.0 for row in arms["aligned"].metrics)
