from __future__ import annotations

import sys
from typing import Any

import pytest

from qarl.errors import ConfigurationError
from qarl.rewards.gym import ReasoningGymScore


def row_of(task: str) -> dict[str, Any]:
    library = pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    return {"entry": library.create_dataset(task, seed=3, size=1)[0], "task": task, "task_config": {}}


@pytest.fixture
def row():
    return row_of("basic_arithmetic")


def test_the_tasks_verifier_scores_what_stands_in_the_last_tag(row, make_prompt, make_completion):
    right = row["entry"]["answer"]
    prompt = make_prompt(**row)
    score = ReasoningGymScore().score
    assert score(prompt, make_completion(f"<answer>0</answer> no, <answer> {right} </answer>")) == 1.0
    assert score(prompt, make_completion(f"<answer>{right}</answer> no, <answer>x</answer>")) < 1.0
    assert score(prompt, make_completion(right)) == 0.0
    assert ReasoningGymScore(tag="").score(prompt, make_completion(f" {right}\n")) == 1.0


def test_no_tag_scores_nothing_even_where_the_verifier_rewards_any_answer(make_prompt, make_completion):
    prompt = make_prompt(**row_of("fraction_simplification"))
    assert ReasoningGymScore().score(prompt, make_completion("<answer>x</answer>")) == 0.01
    assert ReasoningGymScore().score(prompt, make_completion("x")) == 0.0


def test_an_answer_that_the_verifier_cannot_parse_is_wrong(make_prompt, make_completion):
    row = row_of("prime_factorization")
    score = ReasoningGymScore(tag="").score
    assert score(make_prompt(**row), make_completion("The factors are 2 and 3")) == 0.0
    assert score(make_prompt(**row), make_completion(row["entry"]["answer"])) == 1.0


def test_a_verifier_that_cannot_parse_the_reference_answer_is_an_error_of_the_row(make_prompt, make_completion):
    row = row_of("prime_factorization")
    row["entry"]["answer"] = "unknown"
    with pytest.raises(ValueError, match="invalid literal"):
        ReasoningGymScore(tag="").score(make_prompt(**row), make_completion("x"))


def test_a_row_whose_reference_answer_cannot_be_scored_is_refused(make_prompt):
    row = row_of("prime_factorization")
    ReasoningGymScore().check(make_prompt(**row))
    row["entry"]["answer"] = "unknown"
    with pytest.raises(ConfigurationError, match=r"task prime_factorization cannot judge .* of prompt sums/1 \(Value"):
        ReasoningGymScore().check(make_prompt(**row))


def test_row_of_another_source_is_refused(make_prompt):
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    with pytest.raises(ConfigurationError, match="reward reasoning_gym: column `task` is missing"):
        ReasoningGymScore().check(make_prompt(answer="7"))


def test_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigurationError, match=r"reward reasoning_gym needs .*pip install 'qarl-llm\[demo\]'"):
        ReasoningGymScore().prepare()
