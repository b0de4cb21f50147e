"""Weighted sum of reward terms. A completion that a term cannot score has no reward: NaN, and a line that says why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from qarl.errors import ConfigurationError, RunError
from qarl.records import Group, GroupRewards, Prompt
from qarl.rewards.term import Failure, Outcome, Term, column

RESERVED_NAMES = ("mean", "std", "zero_std_groups", "errors")
"""Names of other `reward/*` metrics."""


class Scorer:
    """The reward of a run; implements the role `Reward`.

    When more than a share `max_error_share` (0 to 1) of the completions of one call has no reward, the run stops:
    what is left would no longer be a fair sample.
    """

    def __init__(self, terms: Sequence[Term], max_error_share: float = 0.1) -> None:
        if not terms:
            raise ConfigurationError("rewards: there are no terms; add a [[rewards]] table with a type")
        labels = [term.label for term in terms]
        for label in labels:
            if labels.count(label) > 1:
                raise ConfigurationError(f"rewards: two terms are called {label}; give one another `name`")
            if label in RESERVED_NAMES:
                raise ConfigurationError(
                    f"rewards: a term cannot be called {label}, which is a metric of its own (reward/{label}); "
                    "give it another `name`"
                )
        for term in terms:
            term.prepare()
        self._terms = tuple(terms)
        self._max_error_share = max_error_share

    def check(self, prompt: Prompt) -> None:
        """ConfigurationError where the prompt's row lacks a column that a term reads: better now than mid-run."""
        for term in self._terms:
            for name in term.columns:
                column(prompt, name, term.label)

    def __call__(self, groups: Sequence[Group]) -> list[GroupRewards]:
        """Total and raw term values [G] of every group."""
        rewards = [self._score(group) for group in groups]
        failed = sum(int(group.total.isnan().sum()) for group in rewards)
        scored = sum(len(group.total) for group in rewards)
        if failed > self._max_error_share * scored:
            first = next(line for group in rewards for line in group.errors)
            raise RunError(
                f"{failed} of {scored} completions have no reward, the limit is a share of {self._max_error_share:g}; "
                f"the first: {first}. Correct the reward or its rows, or raise max_reward_error_share"
            )
        return rewards

    def _score(self, group: Group) -> GroupRewards:
        outcomes = {term.label: self._outcomes(term, group) for term in self._terms}
        values = {
            label: [math.nan if isinstance(one, Failure) else one for one in column]
            for label, column in outcomes.items()
        }
        # A term of weight 0 only watches: its failures do not take a completion out of training.
        weighted = [(term.weight, values[term.label]) for term in self._terms if term.weight != 0]
        totals = [
            math.fsum(weight * column[index] for weight, column in weighted) for index in range(len(group.completions))
        ]
        return GroupRewards(
            total=torch.tensor(totals, dtype=torch.float32),
            terms={label: torch.tensor(column, dtype=torch.float32) for label, column in values.items()},
            errors=_error_lines(group, outcomes),
        )

    def _outcomes(self, term: Term, group: Group) -> list[Outcome]:
        outcomes = term.score_group(group)
        assert len(outcomes) == len(group.completions), f"{term.label} scored {len(outcomes)} completions"
        return [
            Failure("the completion was aborted") if completion.finish_reason == "aborted" else outcome
            for completion, outcome in zip(group.completions, outcomes, strict=True)
        ]


def _error_lines(group: Group, outcomes: Mapping[str, Sequence[Outcome]]) -> tuple[str, ...]:
    return tuple(
        f"prompt {group.prompt.id}, completion {index}, reward {label}: {outcome.reason}"
        for label, column in outcomes.items()
        for index, outcome in enumerate(column)
        if isinstance(outcome, Failure)
    )
