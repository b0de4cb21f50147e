from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from qarl.errors import ConfigurationError
from qarl.rewards.term import Failure, ForeignTerm, InvalidValue, Term, as_number, column, failure


class Fragile(Term):
    """Reads the completion as a number."""

    type: str = "fragile"

    def score(self, prompt, completion):
        if completion.text == "fault":
            raise ConfigurationError("not the completion's fault")
        if completion.text == "memory":
            raise MemoryError
        return float(completion.text)


def test_exception_of_one_completion_does_not_touch_the_others(make_group):
    outcomes = Fragile().score_group(make_group("1", "x\ny", "2"))
    assert outcomes == [1.0, Failure("exception", "ValueError: could not convert string to float: 'x\\ny'"), 2.0]


def test_a_value_that_is_no_reward_is_a_failure(make_group):
    assert Fragile().score_group(make_group("nan", "1e38", "1e39")) == [
        Failure("invalid", "returned nan; a reward must be finite, in 32 bits"),
        1e38,
        Failure("invalid", "returned 1e+39; a reward must be finite, in 32 bits"),
    ]


def test_fault_of_the_configuration_is_not_a_failed_completion(make_group):
    with pytest.raises(ConfigurationError, match="not the completion's fault"):
        Fragile().score_group(make_group("1", "fault"))
    with pytest.raises(MemoryError):
        Fragile().score_group(make_group("1", "memory"))


def test_label_is_the_name_or_else_the_type():
    assert Fragile().label == "fragile"
    assert Fragile(name="frail").label == "frail"


def test_name_must_fit_into_a_metric():
    with pytest.raises(ValidationError, match="name"):
        Fragile(name="a/b")


def test_column_that_is_there_is_returned_and_an_empty_one_refused(make_prompt):
    assert column(make_prompt(answer=0), "answer", "x") == 0
    with pytest.raises(ConfigurationError, match="reward x: column `answer` is empty in the row of prompt sums/1"):
        column(make_prompt(answer=None), "answer", "x")


def test_a_row_is_checked_for_the_columns_that_a_term_reads(make_prompt):
    class Reader(Fragile):
        @property
        def columns(self):
            return ("answer", "level")

    Reader().check(make_prompt(answer="7", level=0))
    with pytest.raises(ConfigurationError, match="reward fragile: column `level` is missing from the row"):
        Reader().check(make_prompt(answer="7"))


def test_a_foreign_term_is_called_for_one_completion_at_a_time(make_group):
    class Foreign(ForeignTerm):
        type: str = "foreign"

        def score(self, prompt, completion):
            raise AssertionError("is not asked to score")

    calls = Foreign().calls(make_group("1", "2", id="sums/5"))
    assert [(call.prompt.id, [one.text for one in call.completions]) for call in calls] == [
        ("sums/5", ["1"]),
        ("sums/5", ["2"]),
    ]


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), torch.tensor(2.0), torch.tensor([2])])
def test_numbers_of_all_libraries_are_numbers(value):
    assert as_number(value) == 2.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e39, 10**400])
def test_numbers_without_end_are_refused(value):
    with pytest.raises(InvalidValue, match="must be finite"):
        as_number(value)


def test_the_kind_of_a_failure_follows_from_its_exception():
    assert failure(KeyError("gold")) == Failure("exception", "KeyError: 'gold'")
    assert failure(TimeoutError("no answer")) == Failure("timeout", "TimeoutError: no answer")
    assert failure(InvalidValue("returned\n x")) == Failure("invalid", "returned x")
    assert failure(ValueError("x" * 1000)).reason == "ValueError: " + "x" * 288 + " ..."
