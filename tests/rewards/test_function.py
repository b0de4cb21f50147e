from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from qarl.errors import ConfigurationError
from qarl.rewards.function import Python, resolve, trl_arguments
from qarl.rewards.term import Failure, InvalidValue

MODULE = """
import asyncio

import numpy as np

NUMBER = 7

def lengths(prompts, completions, **columns):
    return [float(len(text)) for text in completions]

def right(prompts, completions, answer, **columns):
    return [float(message["content"] == one) for [message], one in zip(completions, answer)]

def too_few(prompts, completions, **columns):
    return [1.0]

def one_number(prompts, completions, **columns):
    return 1.0

def mixed(prompts, completions, **columns):
    return [None, "1", float("nan"), True]

def array(prompts, completions, **columns):
    return np.array([0.5, 1.5])

async def patient(prompts, completions, **columns):
    await asyncio.sleep(0)
    return [2.0 for _ in completions]

async def patient_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0)
    return 3.0

def broken(prompts, completions, **columns):
    raise KeyError("gold")

def of_the_trainer(prompts, completions, **columns):
    return [float(columns["trainer_state"].global_step)] * len(completions)

def needs_the_trainer(prompts, completions, trainer_state, **columns):
    return [0.0] * len(completions)

def takes_only_answers(prompts, completions, completion_ids, answer):
    return [0.0] * len(completions)

def greedy(prompts, completions, tags, **columns):
    tags[0].clear()
    return [float(len(one)) for one in tags]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "crash":
        raise IndexError("empty")
    bonus = extra_info["bonus"] if extra_info else 0
    return float(data_source == "sums" and solution_str == ground_truth) + bonus

def detailed(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "acc": 1}
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    path = tmp_path / "rules.py"
    path.write_text(MODULE, encoding="utf-8")
    return str(path)


def test_trl_function_gets_texts_or_messages_as_the_row_has_them(module, make_group):
    texts = Python(function=f"{module}:lengths", style="trl").score_group(make_group("a", "bcd", prompt="x"))
    assert texts == [1.0, 3.0]
    conversation = [{"role": "user", "content": "x"}]
    term = Python(function=f"{module}:right", style="trl")
    assert term.score_group(make_group("7", "8", prompt=conversation, answer="7")) == [1.0, 0.0]


def test_trl_arguments_repeat_every_column(make_group):
    arguments = trl_arguments(make_group("a", "b", answer="7", level=3, prompt="x"))
    assert arguments == {
        "answer": ["7", "7"],
        "level": [3, 3],
        "prompts": ["x", "x"],
        "completions": ["a", "b"],
        "completion_ids": [[5, 6, 7], [5, 6, 7]],
    }
    assert trl_arguments(make_group("a"))["prompts"] == ["What is 3 + 4?"]


def test_verl_function_gets_its_four_arguments(module, make_group):
    term = Python(function=f"{module}:compute_score", style="verl")
    row = {"data_source": "sums", "answer": "7"}
    assert term.score_group(make_group("7", "8", **row)) == [1.0, 0.0]
    assert term.score_group(make_group("7", **row, extra_info={"bonus": 2})) == [3.0]
    assert Python(function=f"{module}:detailed", style="verl").score_group(make_group("7", **row)) == [0.5]


def test_verl_function_needs_its_columns(module, make_group):
    with pytest.raises(ConfigurationError, match="reward python: column `data_source` is missing"):
        Python(function=f"{module}:compute_score", style="verl").score_group(make_group("7", answer="7"))


def test_exception_of_a_verl_function_fails_one_completion(module, make_group):
    outcomes = Python(function=f"{module}:compute_score", style="verl").score_group(
        make_group("crash", "7", data_source="sums", answer="7")
    )
    assert outcomes == [Failure("exception", "IndexError: empty"), 1.0]


def test_a_trl_function_is_called_for_a_group_and_a_verl_function_for_a_completion(module, make_group):
    group = make_group("a", "b")
    assert Python(function=f"{module}:lengths", style="trl").calls(group) == [group]
    calls = Python(function=f"{module}:compute_score", style="verl").calls(group)
    assert [[one.text for one in call.completions] for call in calls] == [["a"], ["b"]]


def test_exception_of_a_trl_function_is_that_of_the_call(module, make_group):
    with pytest.raises(KeyError, match="gold"):
        Python(function=f"{module}:broken", style="trl").score_group(make_group("a", "b"))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("too_few", "returned 1 values for 3 completions"),
        ("one_number", r"returned 1.0 \(float\), not a list of 3 numbers"),
    ],
)
def test_wrong_number_of_values_is_no_reward(module, make_group, name, problem):
    with pytest.raises(InvalidValue, match=problem):
        Python(function=f"{module}:{name}", style="trl").score_group(make_group("a", "b", "c"))


def test_values_that_are_no_numbers_are_failures_one_by_one(module, make_group):
    outcomes = Python(function=f"{module}:mixed", style="trl").score_group(make_group("a", "b", "c", "d"))
    assert outcomes == [
        None,
        Failure("invalid", "returned '1' (str), not a number"),
        Failure("invalid", "returned nan; a reward must be finite, in 32 bits"),
        1.0,
    ]


def test_an_array_is_a_list(module, make_group):
    assert Python(function=f"{module}:array", style="trl").score_group(make_group("a", "b")) == [0.5, 1.5]


def test_functions_may_be_asynchronous(module, make_group):
    assert Python(function=f"{module}:patient", style="trl").score_group(make_group("a", "b")) == [2.0, 2.0]
    term = Python(function=f"{module}:patient_score", style="verl")
    assert term.score_group(make_group("a", data_source="sums", answer="7")) == [3.0]


def test_changing_one_completions_columns_changes_no_others(module, make_group):
    term = Python(function=f"{module}:greedy", style="trl")
    assert term.score_group(make_group("a", "b", tags=[1, 2])) == [0.0, 2.0]


def test_what_only_the_trainer_of_trl_can_give_is_named(module, make_group, make_prompt):
    with pytest.raises(ConfigurationError, match="reads `trainer_state`, which only TRL's trainer can give"):
        Python(function=f"{module}:of_the_trainer", style="trl").score_group(make_group("a"))
    with pytest.raises(ConfigurationError, match=r"cannot be called for prompt .*required argument: 'trainer_state'"):
        Python(function=f"{module}:needs_the_trainer", style="trl").check(make_prompt())


def test_a_row_is_checked_against_the_functions_parameters(module, make_prompt):
    term = Python(function=f"{module}:takes_only_answers", style="trl")
    term.check(make_prompt(answer="7"))
    with pytest.raises(ConfigurationError, match=r"unexpected keyword argument 'level'; .* as \*\*columns"):
        term.check(make_prompt(answer="7", level=3))
    Python(function=f"{module}:compute_score", style="verl").check(make_prompt(answer="7", data_source="sums"))


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("{module}:lenghts", r"rules.py has no lenghts; did you mean 'lengths'\?"),
        ("{module}:NUMBER", "is a int, not a function"),
        ("no_such_module:f", r"importing no_such_module failed \(ModuleNotFoundError: .*PYTHONPATH"),
        ("missing/rules.py:f", "missing/rules.py does not exist"),
    ],
)
def test_function_that_is_not_there_is_refused(module, function, problem):
    with pytest.raises(ConfigurationError, match=problem):
        Python(function=function.format(module=module), style="trl").prepare()


def test_module_that_raises_when_imported_is_refused(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("1 / 0", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"importing .*bad.py failed \(ZeroDivisionError"):
        Python(function=f"{path}:f", style="trl").prepare()


def test_function_of_an_installed_module_is_found():
    assert resolve("math:sqrt") is math.sqrt


@pytest.mark.parametrize("settings", [{"function": "math.sqrt", "style": "trl"}, {"function": "math:sqrt"}])
def test_place_and_style_must_be_given(settings):
    with pytest.raises(ValidationError):
        Python.model_validate(settings)
