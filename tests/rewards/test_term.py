from __future__ import annotations

import pytest
from pydantic import ValidationError

from qarl.errors import ConfigurationError
from qarl.rewards.term import Failure, Term, column


class Fragile(Term):
    """Reads the completion as a number."""

    type: str = "fragile"

    def score(self, prompt, completion):
        if completion.text == "fault":
            raise ConfigurationError("not the completion's fault")
        return float(completion.text)


def test_exception_of_one_completion_does_not_touch_the_others(make_group):
    outcomes = Fragile().score_group(make_group("1", "x\ny", "2"))
    assert outcomes == [1.0, Failure("ValueError: could not convert string to float: 'x\\ny'"), 2.0]


def test_fault_of_the_configuration_is_not_a_failed_completion(make_group):
    with pytest.raises(ConfigurationError, match="not the completion's fault"):
        Fragile().score_group(make_group("1", "fault"))


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
