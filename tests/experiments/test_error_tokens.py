import json
import math
from pathlib import Path

import pytest

from experiments.error_tokens import Judged, marks, read_labelled, scores, signs, table, unlabelled
from qarl.tracking.completions import Written

LABELLED = Path(__file__).parents[2] / "experiments/smollm2/labelled.jsonl"


def logs(*probabilities: float) -> list[float]:
    return [math.log(one) for one in probabilities]


RIGHT = Judged(engine=logs(0.9, 0.005), learner=logs(0.9, 0.5), labels="ff")
WRONG = Judged(engine=logs(0.5, 0.009, 1e-9), learner=logs(0.5, 0.0005, 1e-9), labels="fea")


def test_tokens_after_an_error_count_among_all_marks_only() -> None:
    # Of the three that are fine, one is below 0.01, and so are the error and the one after it: 3 of 5.
    found = scores([RIGHT, WRONG], signs(has_learner=True)["engine < 1e-2"])
    assert found == {"recall": 1.0, "precision": 0.5, "false marks per 1000": 1000 / 3, "marks per 1000": 600.0}
    found = scores([RIGHT, WRONG], signs(has_learner=True)["learner < engine / 10"])
    assert found == {"recall": 1.0, "precision": 1.0, "false marks per 1000": 0.0, "marks per 1000": 200.0}


def test_both_limits_of_a_combined_sign_must_be_passed() -> None:
    sign = signs(has_learner=True)["learner < 1e-4 and < engine / 3"]
    one = Judged(engine=logs(3e-5, 1e-5, 1e-2), learner=logs(0.9e-5, 0.9e-5, 1.1e-4), labels="eee")
    assert [sign(one, index) for index in range(3)] == [True, False, False]


def test_an_improbable_token_is_in_a_run_where_another_is_within_four() -> None:
    sign = signs(has_learner=False)["engine < 1e-3, in a run"]
    one = Judged(engine=logs(1e-4, *[0.5] * 3, 1e-4, *[0.5] * 4, 1e-4), learner=[], labels="f" * 10)
    assert [index for index in range(10) if sign(one, index)] == [0, 4]


def test_without_the_learner_only_the_engine_is_asked() -> None:
    assert all(name.startswith("engine") for name in signs(has_learner=False))
    lines = table([RIGHT, WRONG], has_learner=False).split("\n")
    assert lines[2:4] == ["| engine < 1e-1 | 1 | 0.5 | 333 | 600 |", "| engine < 1e-2 | 1 | 0.5 | 333 | 600 |"]


def test_nothing_marked_has_no_precision() -> None:
    assert math.isnan(scores([RIGHT], signs(False)["engine < 1e-5"])["precision"])
    assert scores([WRONG], signs(False)["engine < 1e-5"])["recall"] == pytest.approx(0.0)


def test_a_run_without_quantization_is_its_own_judge() -> None:
    written = Written(
        prompt_id="p/0", prompt="", completion="", reward=None, trained=True, terms={}, finish_reason="stop",
        token_ids=[1, 2], engine_logprobs=logs(0.5, 1e-6), versions=[0, 0],
    )  # fmt: skip
    lines = table([WRONG], has_learner=True, unquantized=unlabelled([written])).split("\n")
    found = {line.split(" | ")[0].strip("| "): float(line.split(" | ")[-1].strip("| ")) for line in lines[2:]}
    assert found["engine < 1e-5"] == found["learner < 1e-5"] == 500.0
    assert found["learner < engine / 3"] == 0.0


def test_the_labelled_file_is_whole() -> None:
    rows = [json.loads(line) for line in LABELLED.read_text(encoding="utf-8").splitlines()]
    assert [row["scheme"] for row in rows] == ["w4a16"] * 23 + ["w3a16-g32"] * 8
    for row in rows:
        lengths = {len(row[key]) for key in ("token_ids", "engine_logprobs", "learner_logprobs", "labels")}
        assert len(lengths) == 1
        assert set(row["labels"]) <= set("efa")
    judged = read_labelled(LABELLED)
    assert [marks(judged, lambda one, index: True, label)[1] for label in "efa"] == [133, 717, 1077]
