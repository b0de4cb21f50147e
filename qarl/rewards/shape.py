"""Terms that look at a completion's form, not at its answer: format, length, repetition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from qarl.readings import repeated_ngrams
from qarl.records import Completion, Prompt
from qarl.rewards.extract import PATTERN_SECONDS, compiled
from qarl.rewards.term import Term


class Format(Term):
    """1 when the text has the form asked for, else 0."""

    type: Literal["format"] = "format"
    pattern: str | None = Field(
        default=None,
        description="Regular expression for the whole text, in the syntax of the `regex` library; a dot also matches a "
        "line end.",
    )
    tags: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Tags (`think`, `answer`) that must each occur once, closed, in this order.",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pattern is None and not self.tags:
            raise ValueError("format needs a pattern, tags, or both; without them every text would be right")
        if self.pattern is not None:
            compiled(self.pattern)
        return self

    def score(self, prompt: Prompt, completion: Completion) -> float:
        return float(self._matches(completion.text) and tags_in_order(completion.text, self.tags))

    def _matches(self, text: str) -> bool:
        return self.pattern is None or compiled(self.pattern).fullmatch(text, timeout=PATTERN_SECONDS) is not None


class Length(Term):
    """A penalty, 0 or less, for long completions, in tokens.

    Soft overlong punishment of DAPO (arXiv 2503.14476, eq. 13): 0 up to `max_tokens - buffer_tokens`, falling
    linearly to -1 at `max_tokens`, -1 beyond. `token_cost` is subtracted for every token.
    """

    type: Literal["length"] = "length"
    max_tokens: int | None = Field(
        default=None, ge=1, description="Length in tokens at which the penalty is -1; usually sampling.max_new_tokens."
    )
    buffer_tokens: int | None = Field(
        default=None, ge=1, description="Tokens before max_tokens over which the penalty grows from 0."
    )
    token_cost: float = Field(default=0.0, ge=0.0, description="Cost of every token, however short the completion.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.max_tokens is None) != (self.buffer_tokens is None):
            raise ValueError("max_tokens and buffer_tokens belong together; set both or neither")
        if self.max_tokens is None and self.token_cost == 0:
            raise ValueError("length needs max_tokens and buffer_tokens, or token_cost; without them it is always 0")
        if self.max_tokens is not None and self.buffer_tokens is not None and self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens {self.buffer_tokens} is above max_tokens {self.max_tokens}; lower it")
        return self

    def score(self, prompt: Prompt, completion: Completion) -> float:
        length = len(completion)
        penalty = -self.token_cost * length
        if self.max_tokens is not None and self.buffer_tokens is not None:
            penalty += overlong(length, self.max_tokens, self.buffer_tokens)
        return penalty


class Repetition(Term):
    """A penalty, 0 to -1: minus the share of n-grams of tokens that occurred before in the same completion."""

    type: Literal["repetition"] = "repetition"
    ngram: int = Field(default=4, ge=1, description="Length of the repeated pieces, in tokens.")

    def score(self, prompt: Prompt, completion: Completion) -> float:
        repeated, ngrams = repeated_ngrams(completion.token_ids.tolist(), self.ngram)
        return -repeated / ngrams if ngrams else 0.0


def overlong(length: int, max_tokens: int, buffer_tokens: int) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), 0 to -1."""
    excess = length - (max_tokens - buffer_tokens)
    return -min(max(excess / buffer_tokens, 0.0), 1.0)


def tags_in_order(text: str, tags: Sequence[str]) -> bool:
    """Whether every tag is opened and closed exactly once, one after another in the given order."""
    position = 0
    for tag in tags:
        for mark in (f"<{tag}>", f"</{tag}>"):
            found = text.find(mark, position)
            if found < 0 or text.count(mark) != 1:
                return False
            position = found + len(mark)
    return True
