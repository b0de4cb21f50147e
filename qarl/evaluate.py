"""Held-out questions: how often the model answers right, and what its answers are worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from qarl.metrics import Mean, Metrics, Sum
from qarl.readings import completion_metrics, reward_metrics
from qarl.records import GroupRewards, Prompt, Sampling
from qarl.roles import Engine, Reward


@dataclass(frozen=True, slots=True, eq=False)
class EvalSet:
    """Questions and how they are asked: `samples` answers each, at temperature 0 the likeliest one.

    An answer is right when the reward term `correct_term` gives it at least 1; without a name, the first term.
    """

    name: str
    prompts: Sequence[Prompt]
    samples: int
    sampling: Sampling
    correct_term: str | None = None


def evaluate(engine: Engine, reward: Reward, questions: EvalSet, seed: tuple[int, ...]) -> Metrics:
    """`eval/<set>/pass@1`, `pass@k` for k = `samples`, `reward_mean`, `length_mean`, `truncated`, `errors`."""
    groups = engine.generate(questions.prompts, questions.samples, questions.sampling, seed)
    rewards = reward(groups)
    correct = [correct_answers(group, questions.correct_term) for group in rewards]
    rollout = reward_metrics(rewards) | completion_metrics(groups)
    metrics: Metrics = {f"pass@{k}": pass_at_k(correct, k) for k in sorted({1, questions.samples})}
    metrics |= {
        "reward_mean": rollout["reward/mean"],
        "length_mean": rollout["completion/length_mean"],
        "truncated": rollout["completion/truncated"],
        "errors": rollout["reward/errors"],
        "questions": Sum(len(groups)),
    }
    return {f"eval/{questions.name}/{name}": metric for name, metric in metrics.items()}


def correct_answers(rewards: GroupRewards, term: str | None) -> tuple[int, int]:
    """(right, gradable) answers of one question; an answer whose reward is an error is not gradable."""
    name = term if term is not None else next(iter(rewards.terms), None)
    scores = rewards.total if name is None else rewards.terms[name]
    gradable = ~(scores.isnan() | rewards.total.isnan())
    return int((scores[gradable] >= 1.0).sum()), int(gradable.sum())


def pass_at_k(correct: Sequence[tuple[int, int]], k: int) -> Mean:
    """Chance that at least one of k answers is right, unbiased: 1 - C(n - c, k) / C(n, k) with c of n right
    (Chen et al. 2021, arXiv 2107.03374, eq. 1), averaged over questions with at least k gradable answers."""
    chances = [1.0 - math.comb(n - c, k) / math.comb(n, k) for c, n in correct if n >= k]
    return Mean(math.fsum(chances), len(chances))
