"""Held-out questions: how often the model answers right, how sure that is, and what its answers are worth."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from qarl.metrics import Last, Mean, Metrics, Sum
from qarl.readings import completion_metrics, error_lines, refuse_errors, reward_metrics
from qarl.records import GroupRewards, Prompt, Sampling
from qarl.roles import Engine, Reward

CONFIDENCE = 0.95
"""Of the intervals: in so many of a hundred repetitions with other questions they hold the true chance."""

log = logging.getLogger("qarl")


@dataclass(frozen=True, slots=True, eq=False)
class EvalSet:
    """Questions and how they are asked: `samples` answers each, at temperature 0 the likeliest one.

    An answer is right when the reward term `correct_term` gives it at least 1; without a name, the first term.
    When more than a share `max_error_share` (0 to 1) of the answers has no reward, that is a RunError.
    """

    name: str
    prompts: Sequence[Prompt]
    samples: int
    sampling: Sampling
    correct_term: str | None = None
    max_error_share: float = 1.0


def evaluate(engine: Engine, reward: Reward, questions: EvalSet, seed: tuple[int, ...]) -> Metrics:
    """`eval/<set>/pass@1`, `pass@k` for k = `samples`, each with the ends of its interval (`pass@1_low`, `_high`),
    `reward_mean`, `length_mean`, `truncated`, `errors`, `questions`.
    """
    groups = engine.generate(questions.prompts, questions.samples, questions.sampling, seed)
    rewards = reward(groups)
    for line in error_lines(rewards):
        log.warning("eval/%s: %s", questions.name, line)
    refuse_errors(rewards, questions.max_error_share)
    correct = [correct_answers(group, questions.correct_term) for group in rewards]
    rollout = reward_metrics(rewards) | completion_metrics(groups)
    metrics: Metrics = {}
    for k in sorted({1, questions.samples}):
        metrics |= pass_metrics(correct, k)
    if all(n < questions.samples for _, n in correct):
        log.warning(
            "eval/%s/pass@%d is not a number: every question has answers without a reward (reward errors)",
            questions.name,
            questions.samples,
        )
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


def pass_metrics(correct: Sequence[tuple[int, int]], k: int) -> Metrics:
    """`pass@k` of (right, gradable) answers of every question, and its interval."""
    low, high = interval(correct, k)
    return {f"pass@{k}": pass_at_k(correct, k), f"pass@{k}_low": Last(low), f"pass@{k}_high": Last(high)}


def pass_at_k(correct: Sequence[tuple[int, int]], k: int) -> Mean:
    """Chance that at least one of k answers is right, averaged over questions with at least k gradable answers."""
    chances = _chances(correct, k)
    return Mean(math.fsum(chances), len(chances))


def interval(correct: Sequence[tuple[int, int]], k: int) -> tuple[float, float]:
    """Where pass@k of all questions like these lies, with `CONFIDENCE`; NaN for both ends without a gradable question.

    Wilson's interval for as many independent yes-or-no answers as would scatter as much as the questions do: questions
    are independent of each other, the answers to one are not. With one answer a question it is Wilson's own (Wilson
    1927; with an effective sample size: Franco et al. 2019, J. Surv. Stat. Methodol. 7(3), 334-364). It stays within 0
    to 1 and keeps its width where all or none are right, as an interval from the standard error alone does not.
    """
    chances = _chances(correct, k)
    if not chances:
        return math.nan, math.nan
    questions = len(chances)
    mean = math.fsum(chances) / questions
    spread = math.fsum((chance - mean) ** 2 for chance in chances) / questions
    if mean in (0.0, 1.0):
        return wilson(mean, questions)  # nothing tells how alike the answers to a question are: the cautious case
    # However little the questions scatter, they know no more than as many separate draws of k answers.
    draws = sum(n // k for _, n in correct)
    return wilson(mean, min(questions * mean * (1.0 - mean) / spread, draws) if spread > 0.0 else draws)


def wilson(share: float, size: float) -> tuple[float, float]:
    """Wilson's interval of a share (0 to 1) seen in `size` independent trials (need not be whole)."""
    z = NormalDist().inv_cdf((1.0 + CONFIDENCE) / 2.0)
    shrink = 1.0 + z * z / size
    centre = (share + z * z / (2.0 * size)) / shrink
    reach = z / shrink * math.sqrt(share * (1.0 - share) / size + z * z / (4.0 * size * size))
    return max(centre - reach, 0.0), min(centre + reach, 1.0)


def _chances(correct: Sequence[tuple[int, int]], k: int) -> list[float]:
    """Each question's chance, unbiased: 1 - C(n - c, k) / C(n, k) with c of n right (Chen et al. 2021, arXiv
    2107.03374, eq. 1)."""
    return [1.0 - math.comb(n - c, k) / math.comb(n, k) for c, n in correct if n >= k]
