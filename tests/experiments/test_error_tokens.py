import math

import pytest

from experiments.error_tokens import Judged, scores, signs, table

RIGHT = Judged(engine=[math.log(0.9), math.log(0.005)], learner=[math.log(0.9), math.log(0.5)], wrong=None)
WRONG = Judged(
    engine=[math.log(0.5), math.log(0.009), math.log(1e-9)],
    learner=[math.log(0.5), math.log(0.0005), math.log(1e-9)],
    wrong=1,
)


def test_a_sign_is_judged_up_to_the_first_wrong_token() -> None:
    # Four tokens are judged: two of each. Below 0.01 is one that is right and the one that is wrong.
    found = scores([RIGHT, WRONG], signs(has_learner=True)["engine < 1e-2"])
    assert found == {"recall": 1.0, "precision": 0.5, "false marks per 1000": 1000 / 3, "share marked": 0.5}
    found = scores([RIGHT, WRONG], signs(has_learner=True)["learner < engine / 10"])
    assert found == {"recall": 1.0, "precision": 1.0, "false marks per 1000": 0.0, "share marked": 0.25}


def test_without_the_learner_only_the_engine_is_asked() -> None:
    assert all(name.startswith("engine") for name in signs(has_learner=False))
    lines = table([RIGHT, WRONG], has_learner=False).split("\n")
    assert lines[2:4] == ["| engine < 1e-1 | 1 | 0.5 | 333 | 0.5 |", "| engine < 1e-2 | 1 | 0.5 | 333 | 0.5 |"]


def test_nothing_marked_has_no_precision() -> None:
    assert math.isnan(scores([RIGHT], signs(False)["engine < 1e-5"])["precision"])
    assert scores([WRONG], signs(False)["engine < 1e-5"])["recall"] == pytest.approx(0.0)
