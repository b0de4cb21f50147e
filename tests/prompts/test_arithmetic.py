from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from qarl.prompts.arithmetic import Arithmetic, ArithmeticRows, expression, value


@pytest.mark.parametrize(
    ("operands", "operations", "written", "result"),
    [
        ([3, 4], ["+"], "3 + 4", 7),
        ([3, 4], ["-"], "3 - 4", -1),
        ([3, -4], ["-"], "3 - (-4)", 7),
        ([2, 3, 4], ["+", "*"], "2 + 3 * 4", 14),
        ([2, 3, 4], ["*", "-"], "2 * 3 - 4", 2),
        ([9, 2, 3, 4], ["-", "*", "+"], "9 - 2 * 3 + 4", 7),
        ([-1, 0], ["*"], "-1 * 0", 0),
    ],
)
def test_products_come_before_sums(operands, operations, written, result):
    assert expression(operands, operations) == written
    assert value(operands, operations) == result


def test_default_is_one_digit_sums(make_tokenizer):
    config = Arithmetic()
    prompts = config.build(config.renderer(make_tokenizer()), seed=0).take(0, 50)
    questions = {f"What is {a} + {b}?": str(a + b) for a in range(1, 10) for b in range(1, 10)}
    assert len(questions) == 81
    for prompt in prompts:
        assert prompt.row["answer"] == questions[prompt.row["question"]]
        assert "Answer with only the number." in prompt.text
        assert prompt.row["question"] in prompt.text
    assert len({prompt.row["question"] for prompt in prompts}) > 20


def test_settings_are_followed():
    rows = ArithmeticRows(
        Arithmetic(minimum=10, maximum=11, operands=3, operations=("*",), template="{expression} = ")
    ).draw(seed=0, count=30)
    assert {row.columns["answer"] for row in rows} == {"1000", "1100", "1210", "1331"}
    assert all(re.fullmatch(r"1[01] \* 1[01] \* 1[01] = ", str(row.content)) for row in rows)


def test_operations_may_be_a_list_as_in_toml():
    assert Arithmetic.model_validate({"operations": ["+", "-"]}).operations == ("+", "-")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"minimum": 5, "maximum": 4}, "minimum 5 is above maximum 4"),
        ({"template": "What is it?"}, "lacks {expression}"),
        ({"operations": []}, "operations"),
        ({"operations": ["/"]}, "operations"),
        ({"operands": 1}, "operands"),
    ],
)
def test_impossible_settings_are_refused(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        Arithmetic.model_validate(settings)
