from random import Random

import pytest

from experiments.tasks import CHARACTERS, TASKS, answer_of, first_wrong


def test_a_sum_is_worked_out_from_the_last_digit_on() -> None:
    assert TASKS["addition"].work("95+17\n") == "95+17+0|\n9+1+1|2\n++1|12\n=112"
    assert TASKS["addition"].work("12+34\n") == "12+34+0|\n1+3+0|6\n++0|46\n=46"


def test_pairs_are_sorted_by_taking_the_first_of_those_left() -> None:
    assert TASKS["sorting"].work("bx.ca.ad\n") == "bx.ca.ad>ad\nbx.ca>bx\nca>ca\n=ad.bx.ca"


@pytest.mark.parametrize("name", TASKS)
def test_every_question_has_work_that_ends_in_its_answer(name: str) -> None:
    random = Random(3)
    for _ in range(50):
        question = TASKS[name].draw(random, (2, 12))
        work = TASKS[name].work(question)
        assert set(question + work) <= set(CHARACTERS) and work.count("=") == 1
        if name == "addition":
            assert answer_of(work) == str(sum(map(int, question.split("+"))))
        else:
            assert answer_of(work).split(".") == sorted(question.strip().split("."))


@pytest.mark.parametrize(
    ("written", "has_stopped", "index"),
    [
        ("ab=c", True, None),
        ("ab", False, None),  # cut off, and right so far
        ("ab", True, 2),  # its stop is wrong
        ("ax=c", True, 1),
        ("ab=cd", True, 4),  # it should have stopped
        ("", True, 0),
    ],
)
def test_the_first_wrong_token_is_where_the_right_work_is_left(written: str, has_stopped: bool, index: int) -> None:
    assert first_wrong("ab=c", written, has_stopped) == index
