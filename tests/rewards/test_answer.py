from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError

from qarl.errors import ConfigurationError
from qarl.rewards.answer import Answer, reference_answers

RIGHT = [
    ("7", "7"),
    ("  7\n", "7"),
    ("3 + 4 = 7", "7"),
    ("10-5", "5"),
    ("The answer is 7.", "7"),
    ("answer is: 7", "7"),
    ("Answer: **7**", "7"),
    ("Answer: $x=7$", "7"),
    ("Answer: 7 (seven)", "7"),
    ("I think 3, no, 8", "8"),
    ("-5", "-5"),
    ("= -5", "-5"),
    ("\u22125", "-5"),
    ("+5", "5"),
    ("-$5", "-5"),
    ("1,234", "1234"),
    ("1234", "1,234"),
    ("$1,234.50", "1234.5"),
    ("1,234,567 people", "1234567"),
    (r"\boxed{1{,}000}", "1000"),
    ("7.0", "7"),
    ("42 apples", "42"),
    ("42", "42 apples"),
    ("Answer: 5 km", "5 km"),
    ("Answer: 7 cm^2", "7 cm2"),
    (r"\boxed{7 \text{ cm}}", "7 cm"),
    ("5 million", "5000000"),
    ("it costs $5 million in all", "5,000,000"),
    (r"3 \times 10^{5}", "300000"),
    ("1/2", "0.5"),
    ("so 1/2.", "1/2"),
    ("4 1/2", "4.5"),
    ("3/4", "6/8"),
    ("-3/4", "-0.75"),
    (r"\boxed{\frac{1}{2}}", "0.5"),
    (r"$-\frac{1}{2}$", "-1/2"),
    (r"\boxed{1\frac{1}{2}}", "1.5"),
    ("50%", "50"),
    ("50%", "0.5"),
    ("0.5", "50%"),
    ("50", "50%"),
    (r"\boxed{50\%}", "50 percent"),
    (r"\boxed{42}", "42"),
    (r"Thus \boxed{x = 7}.", "7"),
    (r"\boxed{\boxed{42}}", "42"),
    ("steps\n#### 42", "42"),
    ("Paris", "Paris"),
    ("so\nit is\nparis.", "Paris"),
    ("Answer: (B)", "B"),
    (r"\boxed{\text{B}}", "B"),
    (r"\boxed{x+1}", "x + 1"),
    (r"\boxed{(1, 2)}", "(1,2)"),
]

WRONG = [
    (r"\boxed{42", "42"),
    (r"\boxed 42", "42"),
    (r"\boxed{}", "42"),
    (r"\boxed{42} and \boxed{42", "42"),
    ("42 ####", "42"),
    ("42 is my answer:", "42"),
    ("", "7"),
    ("no idea", "7"),
    ("-7", "7"),
    ("7", "-7"),
    ("10-5", "-5"),
    ("70", "7"),
    ("7.1", "7"),
    ("1/3", "0.33"),
    ("12,34", "1234"),
    ("1,2,3", "123"),
    ("3+4", "7"),
    (r"\boxed{3+4}", "7"),
    (r"\boxed{7+7}", "7"),
    ("Answer: 2*(3+4)", "2"),
    ("Answer: 7 or 8", "7"),
    ("Answer: 7 or 8", "8"),
    ("Answer: x = 7 or 8", "7"),
    (r"\boxed{7, 8}", "7"),
    ("The answer is 9, not 7", "7"),
    ("0.5%", "50%"),
    ("50%", "5"),
    ("Answer: 5 m", "5 km"),
    ("5 million", "5"),
    ("it costs 5 million", "5"),
    (r"1\frac{1}{2}", "11/2"),
    ("5/0", "0"),
    ("5/0", "5"),
    ("9" * 5000, "9"),
    ("1e999999999", "1"),
    ("2", "CO2"),
    ("2", "2x"),
    ("2", r"2\pi"),
    ("London", "Paris"),
    ("Answer: C", "B"),
    ("[1,2]", "(1,2)"),
    (r"\boxed{\frac{a+b}{2}}", "a+b/2"),
]


@pytest.mark.parametrize(("text", "reference"), RIGHT)
def test_right_answers_are_right(text, reference):
    assert Answer().is_right(text, reference)


@pytest.mark.parametrize(("text", "reference"), WRONG)
def test_wrong_answers_are_wrong(text, reference):
    assert not Answer().is_right(text, reference)


def test_reference_of_gsm8k_and_of_math_is_unwrapped(make_prompt, make_completion):
    for answer in ("3 and 4 make 7.\n#### 7", r"so \boxed{7}", 7, 7.0, ["8", "7"]):
        assert Answer().score(make_prompt(answer=answer), make_completion("7")) == 1.0
        assert Answer().score(make_prompt(answer=answer), make_completion("3")) == 0.0


@pytest.mark.parametrize("answer", ["  ", [], {"value": 7}, ["7", None]])
def test_reference_that_cannot_be_compared_is_refused(answer):
    with pytest.raises(
        ConfigurationError, match=r"reward answer: the answer of prompt sums/1 is .*prompts.answer_column"
    ):
        reference_answers(answer, "sums/1", "answer")


def test_row_without_an_answer_is_refused_with_its_columns(make_prompt, make_completion):
    with pytest.raises(ConfigurationError, match=r"column `answer` is missing .* prompt sums/1, which has solution"):
        Answer().score(make_prompt(solution="7"), make_completion("7"))


def test_cut_off_completions_can_be_wrong_by_rule(make_prompt, make_completion):
    prompt, cut = make_prompt(answer="7"), make_completion("7", finish_reason="length")
    assert Answer().score(prompt, cut) == 1.0
    assert Answer(finished_only=True).score(prompt, cut) == 0.0
    assert Answer(finished_only=True).score(prompt, make_completion("7")) == 1.0


def test_tolerance_and_place_are_followed():
    assert Answer(tolerance=0.01).is_right("3.14", "3.1416")
    assert not Answer(tolerance=0.0001).is_right("3.14", "3.1416")
    assert Answer(extract="last_number").is_right(r"\boxed{1} 7", "7")
    assert not Answer(extract="boxed").is_right("7", "7")
    assert Answer(extract="regex", pattern="<a>(.*?)</a>").is_right("<a>7</a> 8", "7")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"extract": "regex"}, "belong together"),
        ({"pattern": "x"}, "belong together"),
        ({"extract": "regex", "pattern": "("}, "is not a regular expression"),
        ({"extract": "boxes"}, "extract"),
    ],
)
def test_impossible_settings_are_refused(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        Answer.model_validate(settings)


def test_term_can_be_sent_to_another_process():
    term = Answer(tolerance=0.5, name="sum")
    assert pickle.loads(pickle.dumps(term)) == term
