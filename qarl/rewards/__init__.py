"""What a completion is worth: terms, and their weighted sum."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from qarl.rewards.answer import Answer
from qarl.rewards.code import Code
from qarl.rewards.function import Python
from qarl.rewards.gym import ReasoningGymScore
from qarl.rewards.math_verify import MathVerify
from qarl.rewards.scorer import Scorer
from qarl.rewards.shape import Format, Length, Repetition
from qarl.rewards.term import Term

RewardConfig = Annotated[
    Answer | MathVerify | ReasoningGymScore | Code | Format | Length | Repetition | Python, Field(discriminator="type")
]

TERMS: dict[str, type[Term]] = {
    "answer": Answer,
    "math_verify": MathVerify,
    "reasoning_gym": ReasoningGymScore,
    "code": Code,
    "format": Format,
    "length": Length,
    "repetition": Repetition,
    "python": Python,
}

__all__ = [
    "TERMS",
    "RewardConfig",
    "Scorer",
    "Term",
    "Answer",
    "MathVerify",
    "ReasoningGymScore",
    "Code",
    "Format",
    "Length",
    "Repetition",
    "Python",
]
