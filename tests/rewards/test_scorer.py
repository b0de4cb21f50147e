from __future__ import annotations

import importlib.util
import math
import time

import pytest
import torch
from pydantic import TypeAdapter

from qarl.errors import ConfigurationError
from qarl.metrics import values
from qarl.readings import error_lines, reward_metrics
from qarl.records import Group, RewardError
from qarl.rewards import TERMS, RewardConfig
from qarl.rewards.answer import Answer
from qarl.rewards.function import Python
from qarl.rewards.gym import ReasoningGymScore
from qarl.rewards.math_verify import MathVerify
from qarl.rewards.scorer import Scorer
from qarl.rewards.shape import Length
from qarl.rewards.term import Term


class Fragile(Term):
    """Reads the completion as a number; does not apply where there is none at all."""

    type: str = "fragile"

    def score(self, prompt, completion):
        return float(completion.text)

    def score_group(self, group):
        return [None if not one.text else self._attempt(group.prompt, one) for one in group.completions]


def test_total_is_the_weighted_sum_and_terms_are_raw(make_group):
    scorer = Scorer([Answer(weight=2.0), Length(token_cost=0.1, weight=0.5, name="cost")])
    [first, second] = scorer([make_group("7", "8", answer="7"), make_group("1", id="sums/2", answer="1")])
    # Three tokens cost 0.3, half of which counts.
    torch.testing.assert_close(first.total, torch.tensor([1.85, -0.15]))
    torch.testing.assert_close(first.terms["answer"], torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(first.terms["cost"], torch.tensor([-0.3, -0.3]))
    torch.testing.assert_close(second.total, torch.tensor([1.85]))
    assert first.total.dtype == torch.float32
    assert first.errors == ()


def test_completion_without_a_value_is_nan_and_says_why(make_group):
    [rewards] = Scorer([Fragile(), Answer()])([make_group("7", "x", answer="7", id="sums/9")])
    assert rewards.total[0] == 8.0
    assert math.isnan(rewards.total[1])
    assert math.isnan(rewards.terms["fragile"][1])
    assert rewards.terms["answer"][1] == 0.0
    reason = "ValueError: could not convert string to float: 'x'"
    assert rewards.errors == (RewardError("sums/9", 1, "fragile", "exception", reason),)
    assert str(rewards.errors[0]) == f"prompt sums/9, completion 1, reward fragile: {reason}"


def test_term_of_weight_zero_only_watches(make_group):
    [rewards] = Scorer([Fragile(weight=0.0), Answer()])([make_group("x7", answer="7")])
    assert rewards.total.tolist() == [1.0]
    assert math.isnan(rewards.terms["fragile"][0])
    assert len(rewards.errors) == 1


def test_term_that_does_not_apply_adds_nothing(make_group):
    [rewards] = Scorer([Fragile(), Answer(weight=2.0)])([make_group("", "7", answer="7")])
    assert rewards.total.tolist() == [0.0, 9.0]
    assert math.isnan(rewards.terms["fragile"][0])
    assert rewards.errors == ()


def test_a_completion_to_which_no_term_applies_has_no_reward(make_group):
    [rewards] = Scorer([Fragile(), Answer(weight=0.0)])([make_group("", "7", answer="7")])
    assert math.isnan(rewards.total[0])
    assert rewards.total[1] == 7.0
    assert rewards.errors == (
        RewardError("sums/1", 0, "fragile", "invalid", "returned None, and no other term applies"),
    )


def test_a_sum_that_is_too_large_is_no_reward(make_group):
    [rewards] = Scorer([Fragile(weight=1e30)])([make_group("1e10", "1")])
    assert math.isnan(rewards.total[0])
    assert [(error.completion, error.kind) for error in rewards.errors] == [(0, "invalid")]


def test_aborted_completions_are_not_scored_and_no_errors(make_prompt, make_completion):
    completions = [make_completion("x", finish_reason="aborted"), make_completion("7"), make_completion("x")]
    [rewards] = Scorer([Fragile()])([Group(make_prompt(), tuple(completions))])
    assert rewards.total.isnan().tolist() == [True, False, True]
    assert rewards.total[1] == 7.0
    assert rewards.num_aborted == 1
    assert [error.completion for error in rewards.errors] == [2]
    assert values(reward_metrics([rewards]))["reward/errors"] == 1.0


LIBRARIES = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None or importlib.util.find_spec("reasoning_gym") is None,
    reason="math-verify and reasoning-gym are not installed",
)


@LIBRARIES
def test_answers_that_keep_a_verifier_busy_for_ages_are_errors_within_its_limit(make_group):
    import reasoning_gym

    entry = reasoning_gym.create_dataset("countdown", size=1, seed=0)[0]
    row = {"answer": "7", "entry": entry, "task": "countdown", "task_config": {}}
    texts = ["$9^{9^{9^{9}}}$", r"\boxed{(9^{9})!}", "9**9**9", "$7$"]
    scorer = Scorer([MathVerify(timeout=1.0), ReasoningGymScore(timeout=1.0, weight=0.0, tag="")])
    started = time.monotonic()
    [rewards] = scorer([make_group(*texts, **row)])
    assert time.monotonic() - started < 15
    assert rewards.total.isnan().tolist() == [True, True, True, False]
    assert rewards.total[3] == 1.0
    assert rewards.terms["reasoning_gym"].isnan().tolist() == [False, False, True, False]
    found = values(reward_metrics([rewards]))
    assert (found["reward/errors"], found["reward/errors/timeout"]) == (3.0, 4.0)
    assert error_lines([rewards]) == [
        "prompt sums/1, completion 0, reward math_verify: took longer than 1 s (3 times)",
        "prompt sums/1, completion 2, reward reasoning_gym: took longer than 1 s",
    ]
    scorer.check(make_group(**row).prompt)
    with pytest.raises(ConfigurationError, match=r"reads no expression in the answer 'why\?' of prompt sums/2"):
        scorer.check(make_group(**row).prompt, make_group(id="sums/2", **{**row, "answer": "why?"}).prompt)


@pytest.mark.parametrize(
    ("terms", "problem"),
    [
        ([], "there are no terms"),
        ([Answer(), Answer()], "two terms are called answer; give one another `name`"),
        ([Answer(name="mean")], "a term cannot be called mean"),
        ([Python(function="math:nothing", style="verl")], "math has no nothing"),
    ],
)
def test_impossible_terms_are_refused_at_the_start(terms, problem):
    with pytest.raises(ConfigurationError, match=problem):
        Scorer(terms)


def test_no_groups_no_rewards():
    assert Scorer([Answer()])([]) == []


NEEDED: dict[str, dict[str, object]] = {
    "format": {"tags": ["answer"]},
    "length": {"token_cost": 0.1},
    "python": {"function": "m:f", "style": "trl"},
}


@pytest.mark.parametrize("name", TERMS)
def test_every_term_of_the_table_is_read_by_its_type(name):
    term = TypeAdapter(RewardConfig).validate_python({"type": name, "weight": 0.5, **NEEDED.get(name, {})})
    assert type(term) is TERMS[name]
    assert (term.label, term.weight) == (name, 0.5)
