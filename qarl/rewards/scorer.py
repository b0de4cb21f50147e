"""Weighted sum of reward terms. A completion that one cannot score has no reward: NaN, and an error that says why."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from qarl.errors import ConfigurationError
from qarl.records import Group, GroupRewards, Prompt, RewardError
from qarl.rewards.term import LARGEST, Failure, ForeignTerm, Outcome, Term
from qarl.rewards.workers import Workers

RESERVED_NAMES = ("mean", "std", "zero_std_groups", "errors")
"""Names of other `reward/*` metrics."""

NOTHING_APPLIES = Failure("invalid", "returned None, and no other term applies")
TOO_LARGE = Failure("invalid", "the sum of the terms is too large for 32 bits")


class Scorer:
    """The reward of a run; implements the role `Reward`. Foreign terms are run in worker processes."""

    def __init__(self, terms: Sequence[Term]) -> None:
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
        self._terms = tuple(terms)
        self._own = [term for term in terms if not isinstance(term, ForeignTerm)]
        self._workers = Workers([term for term in terms if isinstance(term, ForeignTerm)])
        for term in self._own:
            term.prepare()
        self._workers.prepare()

    def check(self, *prompts: Prompt) -> None:
        """ConfigurationError where a prompt's row is not what the terms need: better now than in the middle of a run.

        Many prompts at a time take less time than one by one.
        """
        for prompt in prompts:
            for term in self._own:
                term.check(prompt)
        self._workers.check(prompts)

    def __call__(self, groups: Sequence[Group]) -> list[GroupRewards]:
        """Total and raw term values [G] of every group; aborted completions are not scored."""
        finished = [
            replace(group, completions=tuple(one for one in group.completions if one.finish_reason != "aborted"))
            for group in groups
        ]
        outcomes = self._workers.score(finished)
        outcomes |= {term.label: [term.score_group(group) for group in finished] for term in self._own}
        return [
            self._rewards(group, {term.label: outcomes[term.label][index] for term in self._terms})
            for index, group in enumerate(groups)
        ]

    def _rewards(self, group: Group, outcomes: Mapping[str, Sequence[Outcome]]) -> GroupRewards:
        """Of outcomes of the completions that were not aborted, by term."""
        places = [index for index, one in enumerate(group.completions) if one.finish_reason != "aborted"]
        total = torch.full((len(group.completions),), math.nan)
        terms = {label: total.clone() for label in outcomes}
        errors = []
        for column, place in enumerate(places):
            found = {label: row[column] for label, row in outcomes.items()}
            for label, outcome in found.items():
                if isinstance(outcome, float):
                    terms[label][place] = outcome
            total[place], failed = self._total(found)
            errors += [RewardError(group.prompt.id, place, label, one.kind, one.reason) for label, one in failed]
        return GroupRewards(total, terms, tuple(errors), num_aborted=len(group.completions) - len(places))

    def _total(self, outcomes: Mapping[str, Outcome]) -> tuple[float, list[tuple[str, Failure]]]:
        """The weighted sum, or NaN, and whatever failed, with its term.

        A term of weight 0 only watches: its failures do not take a completion out of training.
        """
        failed = [(label, outcome) for label, outcome in outcomes.items() if isinstance(outcome, Failure)]
        weighted = [(term, outcomes[term.label]) for term in self._terms if term.weight != 0]
        if any(isinstance(outcome, Failure) for _, outcome in weighted):
            return math.nan, failed
        parts = [term.weight * outcome for term, outcome in weighted if isinstance(outcome, float)]
        if weighted and not parts:
            return math.nan, [*failed, (weighted[0][0].label, NOTHING_APPLIES)]
        total = math.fsum(parts)
        if abs(total) > LARGEST:
            return math.nan, [*failed, (weighted[0][0].label, TOO_LARGE)]
        return total, failed
