"""pass@k and held-out rewards, on answers whose worth is known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from qarl.evaluate import EvalSet, correct_answers, evaluate, pass_at_k
from qarl.metrics import Metrics, values
from qarl.records import Completion, Group, GroupRewards, Prompt, Sampling, Snapshot

PROMPTS = [Prompt(f"q/{index}", (1,), "", {}) for index in range(2)]


@dataclass
class FakeEngine:
    version: int = 0
    asked: list[tuple[int, float, tuple[int, ...]]] = field(default_factory=list)

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, seed: tuple[int, ...]
    ) -> list[Group]:
        self.asked.append((group_size, sampling.temperature, seed))
        one = Completion(torch.tensor([5, 6]), torch.tensor([-1.0, -1.0]), torch.tensor([0, 0]), "length", "")
        return [Group(prompt, (one,) * group_size) for prompt in prompts]

    def load(self, snapshot: Snapshot) -> None: ...

    def metrics(self) -> Metrics:
        return {}


def scores(*groups: list[float]) -> list[GroupRewards]:
    """Term "answer" as given; the total has a bonus of 0.5 on top."""
    return [GroupRewards(torch.tensor(group) + 0.5, {"answer": torch.tensor(group)}) for group in groups]


def test_evaluation_reports_right_answers_rewards_and_lengths() -> None:
    engine = FakeEngine()
    questions = EvalSet("sums", PROMPTS, samples=2, sampling=Sampling(temperature=0.7))
    found = values(evaluate(engine, lambda groups: scores([1.0, 0.0], [0.0, 0.0]), questions, seed=(3, 1)))
    assert engine.asked == [(2, 0.7, (3, 1))]
    assert found["eval/sums/pass@1"] == 0.25  # (1/2 + 0) / 2
    assert found["eval/sums/pass@2"] == 0.5
    assert found["eval/sums/reward_mean"] == 0.75
    assert found["eval/sums/length_mean"] == 2.0
    assert found["eval/sums/truncated"] == 1.0
    assert found["eval/sums/questions"] == 2.0


def test_an_answer_that_could_not_be_graded_is_left_out_and_counted() -> None:
    questions = EvalSet("sums", PROMPTS, samples=2, sampling=Sampling())
    found = values(evaluate(FakeEngine(), lambda groups: scores([1.0, math.nan], [0.0, 0.0]), questions, seed=(0,)))
    assert found["eval/sums/pass@1"] == 0.5  # 1/1 and 0/2
    assert found["eval/sums/pass@2"] == 0.0  # one question has two gradable answers
    assert found["eval/sums/errors"] == 1.0


def test_the_named_term_says_what_is_right() -> None:
    rewards = GroupRewards(
        torch.tensor([5.0, 5.0]), {"format": torch.tensor([1.0, 1.0]), "answer": torch.tensor([0.0, 1.0])}
    )
    assert correct_answers(rewards, "answer") == (1, 2)
    assert correct_answers(rewards, None) == (2, 2)


def test_without_terms_the_total_says_what_is_right() -> None:
    assert correct_answers(GroupRewards(torch.tensor([1.0, 0.99])), None) == (1, 2)


@pytest.mark.parametrize(
    ("right", "of", "k", "expected"),
    [(1, 2, 1, 0.5), (1, 4, 2, 0.5), (2, 4, 2, 1 - 1 / 6), (0, 4, 4, 0.0), (1, 4, 4, 1.0)],
)
def test_pass_at_k_is_the_unbiased_estimate(right: int, of: int, k: int, expected: float) -> None:
    assert math.isclose(pass_at_k([(right, of)], k).value(), expected)


def test_pass_at_k_of_no_gradable_question_is_no_number() -> None:
    assert math.isnan(pass_at_k([(1, 1)], 2).value())
