from __future__ import annotations

import pytest

from qarl.errors import ConfigurationError
from qarl.prompts.rows import Columns, find_columns


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
    row = find_columns([columns]).row("a/1", columns, "a")
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
    assert find_columns(rows).answer == found


@pytest.mark.parametrize(
    ("columns", "content"),
    [
        ({"question": "2+2", "answer": "4", "info": {"level": 1}, "task": "sums"}, "2+2"),
        ({"prompt": "2+2?", "question": "2+2", "answer": "4"}, "2+2?"),
        ({"prompt": [{"role": "user", "content": "2+2?"}], "answer": "4", "info": {}, "task": "sums"},
         ({"role": "user", "content": "2+2?"},)),
    ],
)  # fmt: skip
def test_verifiers_question_is_the_prompt_where_there_is_no_other(columns, content):
    row = find_columns([columns]).row("a/1", columns, "a")
    assert (row.content, row.columns) == (content, columns)


def test_named_columns_are_not_looked_for():
    rows = [{"prompt": "2+2", "answer": "4", "text": "3+3", "meta": {"solution": "6"}}]
    assert find_columns(rows, "text", "meta.solution") == Columns("text", "meta.solution")
    assert find_columns([{"text": "3+3"}]) == Columns("prompt", None)


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
        ({"prompt": " \n"}, "column `prompt` is empty"),
        ({"prompt": [{"role": "user", "content": "\t"}]}, "column `prompt`, message 1: `content` is empty"),
        ({"prompt": "x", "answer": " "}, "column `answer` is empty"),
        ({"prompt": "x", "answer": float("nan")}, "column `answer` is nan, which is no number"),
        ({"prompt": "x", "answer": float("inf")}, "column `answer` is inf, which is no number"),
        ({"prompt": "ab\udc80"}, r"line 3: column `prompt`: character 3 is half of one \(\\udc80, a lone surrogate"),
        ({"prompt": "a\0"}, "line 3: column `prompt`: character 2 is NUL"),
        ({"prompt": [{"role": "user", "content": "\ud800"}]},
         "column `prompt`, message 1, `content`: character 1 is half of one"),
        ({"prompt": "x", "answer": "\0"}, "line 3: column `answer`: character 1 is NUL"),
    ],
)  # fmt: skip
def test_bad_row_is_refused_with_its_place_and_column(columns, problem):
    with pytest.raises(ConfigurationError, match=problem):
        Columns("prompt", "answer").row("f/3", columns, "f, line 3")
