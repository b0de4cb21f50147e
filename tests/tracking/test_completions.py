"""Completions on disk: everything needed to see what was rewarded, and with what."""

import json
import math
from pathlib import Path

import torch

from qarl.records import Completion, Group, GroupRewards, Prompt
from qarl.tracking.completions import Completions, read_completions, step_files


def rollout(step: int) -> tuple[int, list[Group], list[GroupRewards]]:
    completion = Completion(
        torch.tensor([5, 2]), torch.tensor([-0.5, -0.25]), torch.tensor([step, step]), "stop", "sieben ✓"
    )
    cut = Completion(torch.tensor([9]), torch.tensor([-1.0]), torch.tensor([step]), "length", "se")
    group = Group(Prompt("sums/3", (1, 4), "3 + 4?", {"answer": "7"}), (completion, cut))
    rewards = GroupRewards(torch.tensor([1.5, math.nan]), {"answer": torch.tensor([1.0, math.nan])})
    return step, [group], [rewards]


def test_a_line_holds_the_text_the_tokens_and_the_rewards(tmp_path: Path) -> None:
    Completions(tmp_path / "completions", first_step=0).rollout(*rollout(4))
    lines = (tmp_path / "completions" / "step-4.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0]) == {
        "prompt_id": "sums/3",
        "prompt": "3 + 4?",
        "completion": "sieben ✓",
        "reward": 1.5,
        "trained": True,
        "terms": {"answer": 1.0},
        "finish_reason": "stop",
        "token_ids": [5, 2],
        "engine_logprobs": [-0.5, -0.25],
        "versions": [4, 4],
    }
    second = json.loads(lines[1])
    assert (second["reward"], second["terms"], second["finish_reason"]) == (None, {"answer": None}, "length")


def test_a_resumed_run_removes_the_files_of_steps_to_come(tmp_path: Path) -> None:
    first = Completions(tmp_path, first_step=0)
    for step in (1, 2, 10):
        first.rollout(*rollout(step))
    Completions(tmp_path, first_step=2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1.jsonl"]


def test_what_somebody_laid_beside_them_is_left_alone(tmp_path: Path) -> None:
    Completions(tmp_path, first_step=0).rollout(*rollout(1))
    others = ["step-1 copy.jsonl", "step-.jsonl", "step-1.jsonl.bak", "step-\u0663.jsonl"]
    for name in others:
        (tmp_path / name).write_text("mine")
    Completions(tmp_path, first_step=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    Completions(tmp_path, first_step=0).rollout(*rollout(4))
    (path,) = step_files(tmp_path).values()
    (first, second), damaged = read_completions(path)
    assert damaged == []
    assert [first.model_dump(), second.model_dump()] == list(map(json.loads, path.read_text("utf-8").splitlines()))
    assert (first.token_ids, first.engine_logprobs, second.reward) == ([5, 2], [-0.5, -0.25], None)


def test_lines_without_a_whole_completion_are_numbered(tmp_path: Path) -> None:
    Completions(tmp_path, first_step=0).rollout(*rollout(4))
    path = tmp_path / "step-4.jsonl"
    whole = path.read_text(encoding="utf-8")
    uneven = json.dumps({**json.loads(whole.splitlines()[0]), "token_ids": [5]})
    path.write_text(f'{{}}\n{whole}[]\n{uneven}\n{{"prompt', encoding="utf-8")
    found, damaged = read_completions(path)
    assert (len(found), damaged) == (2, [1, 4, 5])


def test_files_come_in_the_order_of_their_steps(tmp_path: Path) -> None:
    tracker = Completions(tmp_path, first_step=0)
    for step in (10, 2):
        tracker.rollout(*rollout(step))
    (tmp_path / "step-1 copy.jsonl").write_text("mine")
    assert list(step_files(tmp_path)) == [2, 10]
