"""Signs that a run is no longer worth its time, each with a limit and what is done when it is passed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from qarl.config import Config


class Rule(Config):
    """When a sign counts, and what follows."""

    limit: float = Field(description="The reading from which on the sign counts.")
    relative: bool = Field(
        False,
        description="Count the limit from the sign's first reading in the run, taken before any update: what is usual "
        "for one task is a collapse for another.",
    )
    steps: int = Field(ge=1, description="For how many steps in a row.")
    action: Literal["off", "warn", "stop"] = Field(
        description="`warn`: a line in run.log, once until the sign has gone; `stop`: the run saves and ends with it."
    )


@dataclass(frozen=True, slots=True)
class Sign:
    """A reading, on which side of the limit it is bad, and what it means."""

    metric: str
    side: Literal["from", "to"]
    meaning: str

    def shows(self, reading: float, limit: float) -> bool:
        """Whether the reading is at the limit or past it; one that is NaN shows nothing."""
        return reading >= limit if self.side == "from" else reading <= limit


SIGNS: Mapping[str, Sign] = {
    "repetition": Sign("completion/repetition", "from", "answers repeat themselves"),
    "error_tokens": Sign("completion/error_tokens", "from", "tokens are sampled that the policy itself finds absurd"),
    "empty": Sign("completion/empty", "from", "answers are empty"),
    "truncated": Sign("completion/truncated", "from", "answers do not end within sampling.max_new_tokens"),
    "entropy": Sign("objective/entropy", "to", "the policy has almost no choice left to learn from"),
    "equal_groups": Sign("reward/zero_std_groups", "from", "all completions of a prompt are worth the same"),
    "mismatch": Sign("mismatch/mean_abs", "from", "the learner's log-probabilities are not the engine's"),
    "no_gradient": Sign("optim/grad_norm", "to", "no update changes the policy"),
}


class Health(Config):
    """Limits to what a run goes on with. Of a sign's keys those that are left out stay as they are by default; one that
    `action = "off"` silences is not looked for.
    """

    repetition: Rule = Field(
        Rule(limit=0.3, relative=True, steps=3, action="stop"),
        description="Share of 4-grams that occurred before in a completion.",
    )
    error_tokens: Rule = Field(
        Rule(limit=0.1, relative=True, steps=3, action="stop"),
        description="Share of tokens whose probability was below 1e-4.",
    )
    empty: Rule = Field(
        Rule(limit=0.9, steps=3, action="stop"), description="Share of completions that stop at their first token."
    )
    truncated: Rule = Field(
        Rule(limit=1.0, steps=10, action="warn"), description="Share of completions cut at the length limit."
    )
    entropy: Rule = Field(
        Rule(limit=1e-3, steps=5, action="warn"), description="Mean entropy of a token, in nats; at or below the limit."
    )
    equal_groups: Rule = Field(
        Rule(limit=1.0, steps=5, action="warn"), description="Share of groups whose rewards are all equal."
    )
    mismatch: Rule = Field(
        Rule(limit=0.1, steps=3, action="warn"),
        description="Mean difference of the two log-probabilities of a token; where alignment is exact, a single bit "
        "stops the run whatever this says.",
    )
    no_gradient: Rule = Field(
        Rule(limit=0.0, steps=5, action="warn"), description="Norm of the gradient; at or below the limit."
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, table: Any) -> Any:
        if not isinstance(table, Mapping):
            return table
        defaults = {name: field.get_default() for name, field in cls.model_fields.items()}
        return {
            name: {**defaults[name].model_dump(), **rule} if name in defaults and isinstance(rule, Mapping) else rule
            for name, rule in table.items()
        }

    def rule(self, name: str) -> Rule:
        """The rule of a sign in SIGNS."""
        found = getattr(self, name)
        assert isinstance(found, Rule)
        return found


class Watch:
    """Follows the signs from step to step."""

    def __init__(self, health: Health) -> None:
        self._rules = {name: health.rule(name) for name in SIGNS if health.rule(name).action != "off"}
        self._steps = dict.fromkeys(self._rules, 0)
        self._first: dict[str, float] = {}

    def look(self, metrics: Mapping[str, float | None]) -> tuple[list[str], list[str]]:
        """Warnings, and reasons to stop, after one more step with these metrics; an absent reading shows nothing."""
        due: dict[str, list[str]] = {"warn": [], "stop": []}
        for name, rule in self._rules.items():
            sign = SIGNS[name]
            reading = metrics.get(sign.metric)
            limit = rule.limit + (self._first_reading(name, reading) if rule.relative else 0.0)
            shows = reading is not None and sign.shows(reading, limit)
            self._steps[name] = self._steps[name] + 1 if shows else 0
            # A warning is said once; a run that was stopped and goes on stops again until its limits are others.
            if self._steps[name] == rule.steps or (rule.action == "stop" and self._steps[name] > rule.steps):
                due[rule.action].append(
                    f"{sign.meaning}: {sign.metric} = {reading:.4g} for {self._steps[name]} steps in a row "
                    f"(health.{name}.limit = {rule.limit:g}"
                    + (f" above the first reading, {self._first[name]:.4g})" if rule.relative else ")")
                )
        return due["warn"], due["stop"]

    def _first_reading(self, name: str, reading: float | None) -> float:
        """NaN, with which nothing shows, until there is one."""
        if reading is not None and not math.isnan(reading):
            self._first.setdefault(name, reading)
        return self._first.get(name, math.nan)
