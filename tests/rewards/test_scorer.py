from __future__ import annotations

import math

import pytest
import torch
from pydantic import TypeAdapter

from qarl.errors import ConfigurationError, RunError
from qarl.records import Group
from qarl.rewards import TERMS, RewardConfig
from qarl.rewards.answer import Answer
from qarl.rewards.function import Python
from qarl.rewards.scorer import Scorer
from qarl.rewards.shape import Length
from qarl.rewards.term import Term


class Fragile(Term):
    """Reads the completion as a number."""

    type: str = "fragile"

    def score(self, prompt, completion):
        return float(completion.text)


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
    [rewards] = Scorer([Fragile(), Answer()], max_error_share=0.5)([make_group("7", "x", answer="7", id="sums/9")])
    assert rewards.total[0] == 8.0
    assert math.isnan(rewards.total[1])
    assert math.isnan(rewards.terms["fragile"][1])
    assert rewards.terms["answer"][1] == 0.0
    assert rewards.errors == (
        "prompt sums/9, completion 1, reward fragile: ValueError: could not convert string to float: 'x'",
    )


def test_term_of_weight_zero_only_watches(make_group):
    [rewards] = Scorer([Fragile(weight=0.0), Answer()])([make_group("x7", answer="7")])
    assert rewards.total.tolist() == [1.0]
    assert math.isnan(rewards.terms["fragile"][0])
    assert len(rewards.errors) == 1


def test_too_many_failures_end_the_run(make_group):
    groups = [make_group("1", "x", "1", "1", id="sums/1"), make_group("1", "y", "1", "1", id="sums/2")]
    assert len(Scorer([Fragile()], max_error_share=0.25)(groups)) == 2
    with pytest.raises(
        RunError, match=r"2 of 8 completions have no reward, .* share of 0.2; the first: prompt sums/1, "
    ):
        Scorer([Fragile()], max_error_share=0.2)(groups)


def test_aborted_completion_has_no_reward(make_prompt, make_completion):
    group = Group(make_prompt(answer="7"), (make_completion("7"), make_completion("7", finish_reason="aborted")))
    [rewards] = Scorer([Answer()], max_error_share=0.5)([group])
    assert rewards.total[0] == 1.0
    assert math.isnan(rewards.total[1])
    assert rewards.errors == ("prompt sums/1, completion 1, reward answer: the completion was aborted",)


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
