from __future__ import annotations

import os
import subprocess
import sys

import pytest

from qarl.errors import ConfigurationError
from qarl.prompts.gym import GymRows, ReasoningGym


@pytest.fixture
def gym():
    return pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")


def test_questions_carry_what_the_scorer_needs(gym, make_tokenizer):
    config = ReasoningGym(task="basic_arithmetic", config={"max_digits": 2})
    prompts = config.build(config.renderer(make_tokenizer()), seed=0).take(3, 4)
    assert len({prompt.row["question"] for prompt in prompts}) == 4
    for prompt in prompts:
        row = prompt.row
        assert row["question"] in prompt.text
        assert row["entry"] == {name: row[name] for name in ("question", "answer", "metadata")}
        assert (row["task"], row["task_config"]) == ("basic_arithmetic", {"max_digits": 2})
    assert prompts[0].id == "reasoning_gym.basic_arithmetic/3-0"


def test_questions_are_a_function_of_the_seed(gym):
    rows = GymRows("basic_arithmetic", {})
    questions = [[row.content for row in rows.draw(seed, 3)] for seed in (100, 100, 200)]
    assert questions[0] == questions[1]
    assert not set(questions[0]) & set(questions[2])


DRAW = """
from qarl.process import hash_alike
hash_alike()
import reasoning_gym
print([entry["question"] for entry in reasoning_gym.create_dataset("ransom_note", seed=7, size=3)])
"""


def test_questions_are_the_same_in_every_process_of_the_command_line(gym):
    """This task draws from a set of texts, whose order follows Python's hashes."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", DRAW], env=os.environ | {"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE, text=True
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate(timeout=120)[0] for process in processes)
    assert first == second and "ransom" in first.lower()


@pytest.mark.parametrize(
    ("task", "config", "problem"),
    [
        (
            "basic_aritmetic",
            {},
            "prompts.task: reasoning_gym has no task 'basic_aritmetic' .*did you mean 'basic_arithmetic",
        ),
        ("basic_arithmetic", {"max_digit": 2}, "no setting 'max_digit'; it has .*did you mean 'max_digits"),
        ("basic_arithmetic", {"seed": 2}, "no setting 'seed'"),
        ("basic_arithmetic", {"min_digits": 9, "max_digits": 2}, "basic_arithmetic refuses .*correct the settings"),
        ("basic_arithmetic", {"min_digits": "x"}, "basic_arithmetic refuses"),
        ("aiw", {"task_types": ["siblings"], "task_type_weights": [1.0]}, "aiw refuses .*no attribute 'value'"),
    ],
)
def test_unknown_task_or_setting_is_refused(gym, task, config, problem):
    with pytest.raises(ConfigurationError, match=problem):
        GymRows(task, config)


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'qarl-llm\[demo\]'"):
        GymRows("basic_arithmetic", {})
