"""Synthetic sums and products: the task that a small model learns on a CPU."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod
from typing import Literal, Self

from pydantic import Field, model_validator

from qarl.prompts.chat import Renderer
from qarl.prompts.rows import Row
from qarl.prompts.source import GeneratedPrompts, SourceConfig, SplitSource

Operation = Literal["+", "-", "*"]


class Arithmetic(SourceConfig):
    """Questions such as "What is 3 + 4?", drawn afresh at every step.

    Held-out questions are drawn from seeds that training never uses, but small operands leave few questions (two of
    1 to 9 make 81), so the same question can come up on both sides: "held out" then means freshly drawn.
    """

    type: Literal["arithmetic"] = "arithmetic"
    minimum: int = Field(default=1, description="Smallest operand.")
    maximum: int = Field(default=9, description="Largest operand.")
    operands: int = Field(default=2, ge=2, le=16, description="How many operands a question has.")
    operations: tuple[Operation, ...] = Field(
        default=("+",), min_length=1, strict=False, description="Operations to draw from: +, - and *."
    )
    template: str = Field(default="What is {expression}?", description="The question; {expression} is filled in.")
    system: str | None = Field(
        default="Answer with only the number.", description="System message put before every prompt."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.minimum > self.maximum:
            raise ValueError(f"minimum {self.minimum} is above maximum {self.maximum}; swap them")
        if "{expression}" not in self.template:
            raise ValueError(f"template {self.template!r} lacks {{expression}}, so every question would be the same")
        return self

    def build(self, renderer: Renderer, seed: int) -> SplitSource:
        return GeneratedPrompts(ArithmeticRows(self), renderer, seed)


class ArithmeticRows:
    """Rows with `question`, `answer` (a text) and `data_source`."""

    name = "arithmetic"

    def __init__(self, config: Arithmetic) -> None:
        self._config = config

    def draw(self, seed: int, count: int) -> Sequence[Row]:
        rng = random.Random(seed)
        return [self._row(rng) for _ in range(count)]

    def _row(self, rng: random.Random) -> Row:
        config = self._config
        operands = [rng.randint(config.minimum, config.maximum) for _ in range(config.operands)]
        operations = [rng.choice(config.operations) for _ in operands[1:]]
        question = config.template.replace("{expression}", expression(operands, operations))
        columns = {
            "question": question,
            "answer": str(value(operands, operations)),
            "data_source": self.name,
        }
        return Row("", question, columns, "")


def expression(operands: Sequence[int], operations: Sequence[Operation]) -> str:
    """The written form; negative operands after the first stand in parentheses."""
    words = [str(operands[0])]
    for operation, operand in zip(operations, operands[1:], strict=True):
        words += [operation, str(operand) if operand >= 0 else f"({operand})"]
    return " ".join(words)


def value(operands: Sequence[int], operations: Sequence[Operation]) -> int:
    """What the expression comes to: products first, then sums and differences."""
    terms = [[operands[0]]]
    for operation, operand in zip(operations, operands[1:], strict=True):
        if operation == "*":
            terms[-1].append(operand)
        else:
            terms.append([operand if operation == "+" else -operand])
    return sum(prod(factors) for factors in terms)
