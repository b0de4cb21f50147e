from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from qarl.errors import ConfigurationError, RunError
from qarl.rewards.function import Python, as_number, resolve, trl_arguments
from qarl.rewards.term import Failure

MODULE = """
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

def broken(prompts, completions, **columns):
    raise KeyError("gold")

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
    assert outcomes == [Failure("IndexError: empty"), 1.0]


def test_exception_of_a_trl_function_fails_its_group(module, make_group):
    outcomes = Python(function=f"{module}:broken", style="trl").score_group(make_group("a", "b"))
    assert outcomes == [Failure("KeyError: 'gold'")] * 2


@pytest.mark.parametrize(("name", "got"), [("too_few", "1 values"), ("one_number", "float")])
def test_wrong_number_of_values_ends_the_run(module, make_group, name, got):
    with pytest.raises(RunError, match=rf"rules.py:{name} returned {got} for 3 completions .* one number for each"):
        Python(function=f"{module}:{name}", style="trl").score_group(make_group("a", "b", "c"))


def test_values_that_are_no_numbers_are_failures_one_by_one(module, make_group):
    outcomes = Python(function=f"{module}:mixed", style="trl").score_group(make_group("a", "b", "c", "d"))
    assert outcomes[:3] == [
        Failure("the function returned None (NoneType), not a number"),
        Failure("the function returned '1' (str), not a number"),
        Failure("the function returned nan; a reward must be finite"),
    ]
    assert outcomes[3] == 1.0


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), torch.tensor(2.0), torch.tensor([2])])
def test_numbers_of_all_libraries_are_numbers(value):
    assert as_number(value) == 2.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_infinite_numbers_are_refused(value):
    with pytest.raises(ValueError, match="must be finite"):
        as_number(value)


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
