"""pass@k, how sure it is, and held-out rewards, on answers whose worth is known."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from qarl.evaluate import EvalSet, correct_answers, evaluate, interval, pass_at_k, wilson
from qarl.metrics import Metrics, values
from qarl.records import Completion, Group, GroupRewards, Prompt, Sampling, Snapshot
from qarl.roles import Stop

PROMPTS = [Prompt(f"q/{index}", (1,), "", {}) for index in range(2)]


@dataclass
class FakeEngine:
    version: int = 0
    asked: list[tuple[int, float, tuple[int, ...]]] = field(default_factory=list)

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int, ...],
        stop: Stop | None = None,
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
    # Of 1/2 and 0: mean 1/4, spread 1/16, so as sure as 2 * (1/4 * 3/4) / (1/16) = 6 answers; but there are only 4.
    assert (found["eval/sums/pass@1_low"], found["eval/sums/pass@1_high"]) == wilson(0.25, 4.0)
    assert (found["eval/sums/pass@2_low"], found["eval/sums/pass@2_high"]) == wilson(0.5, 2.0)


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
    assert all(math.isnan(end) for end in interval([(1, 1)], 2))


def test_a_figure_that_is_no_number_has_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    def reward(groups: object) -> list[GroupRewards]:
        return scores([1.0, math.nan], [math.nan, 0.0])

    questions = EvalSet("sums", PROMPTS, samples=2, sampling=Sampling())
    found = values(evaluate(FakeEngine(), reward, questions, seed=(0,)))
    assert math.isnan(found["eval/sums/pass@2"]) and found["eval/sums/pass@1"] == 0.5
    assert "eval/sums/pass@2 is not a number: every question has answers without a reward" in caplog.text


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_one_answer_a_question_has_wilson_s_interval(right: int, of: int, low: float, high: float) -> None:
    """Figures of Newcombe 1998 (Statistics in Medicine 17, 857-872), table I, method 3."""
    found = interval([(1, 1)] * right + [(0, 1)] * (of - right), 1)
    assert found == pytest.approx((low, high), abs=5e-5)
    assert found == pytest.approx(wilson(right / of, of))


def test_more_answers_narrow_an_interval_only_where_answers_to_a_question_differ() -> None:
    once = interval([(1, 1)] * 10 + [(0, 1)] * 10, 1)
    # All answers to a question are alike: twenty questions are still all that is known.
    assert interval([(8, 8)] * 10 + [(0, 8)] * 10, 1) == pytest.approx(once)
    # Every question is right every other time: as good as 160 answers, and no better.
    assert interval([(4, 8)] * 20, 1) == pytest.approx(wilson(0.5, 160.0))
    low, high = interval([(4, 8)] * 10 + [(3, 8), (5, 8)] * 5, 1)
    assert (low, high) == pytest.approx(wilson(0.5, 160.0))
    assert high - low < (once[1] - once[0]) / 2


def test_an_interval_of_all_or_none_has_a_width_and_stays_within_bounds() -> None:
    assert interval([(4, 4)] * 20, 1) == pytest.approx((1.0 - 0.1611, 1.0), abs=5e-5)
    assert interval([(0, 4)] * 20, 4) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert interval([(1, 1)], 1)[1] == 1.0


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("k", [1, 4])
def test_intervals_hold_the_true_chance_as_often_as_they_promise(samples: int, k: int) -> None:
    """Questions with chances of Beta(1, 2): pass@1 is 1/3, pass@k is 1 - 2 / (k + 2)."""
    if k > samples:
        pytest.skip("fewer answers than k have no pass@k")
    rng = random.Random(samples * 10 + k)
    truth = 1 - 2 / (k + 2)
    repeats, held = 1000, 0
    for _ in range(repeats):
        chances = [rng.betavariate(1, 2) for _ in range(60)]
        low, high = interval([(sum(rng.random() < p for _ in range(samples)), samples) for p in chances], k)
        held += low <= truth <= high
    # Three standard errors of a thousand repetitions are 0.02.
    assert 0.92 <= held / repeats <= 0.98
