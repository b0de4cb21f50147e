"""Tasks whose answers are worked out line by line, over hundreds of characters, and can be checked.

Every line follows from the line before it, so that one wrong character spoils all that comes after: what long
reasoning is to a large model, at a size that a CPU trains in minutes. There is one right way to write the work, so
where a completion first leaves it is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

LETTERS = "abcdefghij"
CHARACTERS = "\n+.0123456789=>|" + LETTERS
PAIRS = [first + second for first in LETTERS for second in LETTERS]


@dataclass(frozen=True, slots=True)
class Task:
    """`question(random, size)` draws one; `work(question)` is what answers it, and ends in `=` and the answer."""

    question: Callable[[Random, int], str]
    work: Callable[[str], str]

    def draw(self, random: Random, sizes: tuple[int, int]) -> str:
        """A question of a size within `sizes`, both included."""
        return self.question(random, random.randint(*sizes))


def answer_of(work: str) -> str:
    return work.rpartition("=")[2]


def first_wrong(work: str, written: str, has_stopped: bool) -> int | None:
    """Index of the first character in which a completion leaves the right work, or None.

    It is `len(written)` where the completion stops too early: its stop is the wrong token.
    """
    for index, (right, character) in enumerate(zip(work, written, strict=False)):
        if right != character:
            return index
    if len(written) > len(work):
        return len(work)
    return len(written) if has_stopped and len(written) < len(work) else None


def _sum(random: Random, digits: int) -> str:
    first, second = (random.randint(10 ** (digits - 1), 10**digits - 1) for _ in range(2))
    return f"{first}+{second}\n"


def _add(question: str) -> str:
    """From the last digit on: what is left of both numbers, the carry, and the digits of the sum so far.

    `12+34+0|`, `1+3+0|6`, `++0|46`, `=46`.
    """
    left, right = question.strip().split("+")
    carry, total = 0, ""
    lines = []
    while left:
        lines.append(f"{left}+{right}+{carry}|{total}\n")
        carry, digit = divmod(int(left[-1]) + int(right[-1]) + carry, 10)
        left, right, total = left[:-1], right[:-1], f"{digit}{total}"
    answer = f"{carry or ''}{total}"
    return "".join([*lines, f"++{carry}|{total}\n={answer}"])


def _pairs(random: Random, count: int) -> str:
    return ".".join(random.sample(PAIRS, count)) + "\n"


def _sort(question: str) -> str:
    """In alphabetical order: what is left, and the first of it.

    `bx.ca.ad>ad`, `bx.ca>bx`, `ca>ca`, `=ad.bx.ca`.
    """
    left = question.strip().split(".")
    chosen, lines = [], []
    while left:
        first = min(left)
        lines.append(f"{'.'.join(left)}>{first}\n")
        left.remove(first)
        chosen.append(first)
    return "".join([*lines, f"={'.'.join(chosen)}"])


TASKS: Mapping[str, Task] = {"addition": Task(_sum, _add), "sorting": Task(_pairs, _sort)}
