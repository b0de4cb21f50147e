from __future__ import annotations

import pytest

from qarl.errors import ConfigurationError
from qarl.prompts.rows import Columns, find_answer_column


def test_trl_row_keeps_every_column():
    row = Columns("prompt", "answer").row("a/1", {"prompt": "2+2", "answer": "4", "level": 3}, "a.jsonl, line 1")
    assert row.content == "2+2"
    assert row.columns == {"prompt": "2+2", "answer": "4", "level": 3}


def test_verl_answer_becomes_the_column_answer():
    columns = {
        "prompt": [{"role": "user", "content": "2+2"}],
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }
    row = Columns("prompt", find_answer_column([columns])).row("a/1", columns, "a")
    assert row.content == ({"role": "user", "content": "2+2"},)
    assert row.columns["answer"] == "4"
    assert row.columns["data_source"] == "sums"


def test_column_named_with_a_dot_wins_over_the_nested_one():
    row = Columns("a.b", None).row("a/1", {"a.b": "flat", "a": {"b": "nested"}}, "a")
    assert row.content == "flat"


@pytest.mark.parametrize(
    ("rows", "found"),
    [
        ([{"answer": "1"}, {}], "answer"),
        ([{"answer": None, "reward_model": {"ground_truth": "1"}}], "reward_model.ground_truth"),
        ([{"solution": "1"}], None),
    ],
)
def test_answer_is_found_under_trls_and_verls_name_only(rows, found):
    assert find_answer_column(rows) == found


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"promt": "x"}, r"f, line 3: column `prompt` is missing; the row has promt\..*did you mean 'promt"),
        ({"prompt": ""}, "column `prompt` is empty"),
        ({"prompt": None}, "column `prompt` is empty"),
        ({"prompt": 7}, "column `prompt` is of type int"),
        ({"prompt": []}, "column `prompt` is empty; a prompt is a text or a non-empty list"),
        ({"prompt": ["x"]}, "message 1 is of type str"),
        ({"prompt": [{"role": "user"}]}, "message 1: `content` is missing"),
        ({"prompt": [{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "image"}]}]},
         "message 2: `content` is of type list; it must be a text"),
        ({"prompt": "x"}, "column `answer` is missing"),
    ],
)  # fmt: skip
def test_bad_row_is_refused_with_its_place_and_column(columns, problem):
    with pytest.raises(ConfigurationError, match=problem):
        Columns("prompt", "answer").row("f/3", columns, "f, line 3")
