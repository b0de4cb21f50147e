from __future__ import annotations

import logging
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from qarl.errors import ConfigurationError
from qarl.rewards.math_verify import MathVerify


@pytest.fixture
def library():
    return pytest.importorskip("math_verify", reason="math-verify is not installed")


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        (r"so $\boxed{0.5}$", "1/2", 1.0),
        (r"$\boxed{x + x}$", "$2x$", 1.0),
        (r"$\boxed{\frac{\sqrt{8}}{2}}$", r"\sqrt{2}", 1.0),
        (r"$\boxed{\frac{1}{3}}$", "1/2", 0.0),
        (r"\boxed{42", "42", 0.0),
        (r"$42$, so \boxed{42", "42", 0.0),
        ("no idea", "42", 0.0),
        ("42", ["41", "42"], 1.0),
    ],
)
def test_equivalent_expressions_are_right(library, make_prompt, make_completion, text, answer, score):
    assert MathVerify().score(make_prompt(answer=answer), make_completion(text)) == score


def test_it_works_in_a_thread(library, make_prompt, make_completion):
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(MathVerify().score, make_prompt(answer="1/2"), make_completion("$0.5$")).result() == 1.0


def test_reference_that_is_no_mathematics_is_refused(library, make_prompt, make_completion):
    for answer in ("why?", "no idea at all"):
        with pytest.raises(ConfigurationError, match="math_verify reads no expression in the answer"):
            MathVerify().score(make_prompt(answer=answer), make_completion("42"))


def test_a_row_is_checked_for_a_reference_that_can_be_read(library, make_prompt):
    MathVerify().check(make_prompt(answer=[r"\frac{1}{2}", "0.5"]))
    for answer, problem in (("why?", "reads no expression in the answer"), ([], "it must be a text, a number")):
        with pytest.raises(ConfigurationError, match=problem):
            MathVerify().check(make_prompt(answer=answer))


def test_the_library_does_not_warn_of_the_limits_that_it_lacks(
    library, monkeypatch, make_prompt, make_completion, caplog
):
    monkeypatch.setattr("math_verify.parser.TIMEOUT_WARNING_SHOWN", False)
    logging.getLogger("math_verify").setLevel(logging.NOTSET)
    MathVerify().prepare()
    MathVerify().score(make_prompt(answer="7"), make_completion("$7$"))
    assert caplog.records == []


def test_only_the_end_of_a_long_completion_is_read(library, make_prompt, make_completion):
    assert MathVerify(max_characters=10).score(make_prompt(answer="42"), make_completion("$42$" + " " * 20)) == 0.0


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigurationError, match=r"reward math_verify needs .*pip install 'qarl-llm\[demo\]'"):
        MathVerify().prepare()
