from __future__ import annotations

import pytest

from qarl.rewards import extract
from qarl.rewards.extract import final_answer, has_marker, last_boxed, last_line


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        (r"\boxed{42}", "42"),
        (r"first \boxed{1}, then \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed {7}", "7"),
        (r"\boxed{\{1\}}", r"\{1\}"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{42", None),
        (r"\boxed{\frac{1}{2}", None),
        (r"\boxed{42} or \boxed{43", None),
        (r"\boxed 42", None),
        (r"\boxed{}", None),
        ("42", None),
    ],
)
def test_last_boxed(text, boxed):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"#### 1, answer: 2, \boxed{3} 4", "3"),
        ("answer: 2\n#### 1\n4", "1"),
        ("Answer: 2\n4", "2"),
        ("**Final Answer:** 2", "2"),
        ("The answer is 2.", "2."),
        ("the answer is:\n\n 2\nbecause", "2"),
        ("answer: 1\nanswer: 2", "2"),
        ("my answering machine says 4", "4"),
        ("1 + 3 = 4", "4"),
        ("none", None),
        (r"\boxed{3 4", None),
        ("answer:", None),
        ("4 ####", None),
    ],
)
def test_auto_takes_the_strongest_marker_and_nothing_weaker(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("where", "text", "answer"),
    [
        ("boxed", "42", None),
        ("hash", "42", None),
        ("hash", "#### 1\n#### 2 apples\nok", "2 apples"),
        ("label", "#### 42", None),
        ("last_number", r"\boxed{1} 2", "2"),
        ("text", " all of it ", "all of it"),
        ("text", " ", None),
    ],
)
def test_named_places(where, text, answer):
    assert final_answer(text, where) == answer


def test_regex_takes_its_group_of_the_last_match():
    assert final_answer("<a>1</a><a>2</a>", "regex", "<a>(.*?)</a>") == "2"
    assert final_answer("v1 v2", "regex", "v[0-9]") == "v2"
    assert final_answer("none", "regex", "v[0-9]") is None


def test_a_regex_that_runs_away_is_stopped(monkeypatch):
    monkeypatch.setattr(extract, "PATTERN_SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        final_answer("a" * 100 + "!", "regex", "(a|aa)+$")


def test_markers_and_lines():
    assert has_marker("#### 1")
    assert not has_marker("1 + 1 = 2")
    assert last_line("a\n b \n\n") == "b"
    assert last_line("\n") is None
