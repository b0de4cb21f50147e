"""Tasks whose answers are worked out line by line, over hundreds of characters, and can be checked.

Every line follows from the line before it, so that one wrong character spoils all that comes after: what long
reasoning is to a large model, at a size that a CPU trains in minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Example:
    """A question, the work that answers it, and the answer, which the work ends in after `=`."""

    prompt: str
    work: str
    answer: str


def addition(random: Random, smallest: int, largest: int) -> Example:
    """The sum of two numbers of `smallest` to `largest` digits, from the last digit on.

    A line holds what is left of both numbers, the carry, and the digits of the sum so far: `12+34+0|`, `1+3+0|6`,
    `++0|46`, `=46`.
    """
    digits = random.randint(smallest, largest)
    first, second = (str(random.randint(10 ** (digits - 1), 10**digits - 1)) for _ in range(2))
    answer = str(int(first) + int(second))
    left, right, carry, total = first, second, 0, ""
    lines = []
    while left:
        lines.append(f"{left}+{right}+{carry}|{total}\n")
        carry, digit = divmod(int(left[-1]) + int(right[-1]) + carry, 10)
        left, right, total = left[:-1], right[:-1], f"{digit}{total}"
    lines.append(f"++{carry}|{total}\n={answer}")
    return Example(f"{first}+{second}\n", "".join(lines), answer)


def sorting(random: Random, smallest: int, largest: int) -> Example:
    """`smallest` to `largest` different pairs of letters in alphabetical order, the first of those left in each line.

    `bx.ca.ad>ad`, `bx.ca>bx`, `ca>ca`, `=ad.bx.ca`.
    """
    count = random.randint(smallest, largest)
    left = random.sample(PAIRS, count)
    prompt, chosen, lines = ".".join(left), [], []
    while left:
        first = min(left)
        lines.append(f"{'.'.join(left)}>{first}\n")
        left.remove(first)
        chosen.append(first)
    answer = ".".join(chosen)
    return Example(f"{prompt}\n", f"{''.join(lines)}={answer}", answer)


LETTERS = "abcdefghij"
PAIRS = [first + second for first in LETTERS for second in LETTERS]

Task = Callable[[Random, int, int], Example]

TASKS: Mapping[str, Task] = {"addition": addition, "sorting": sorting}
CHARACTERS = "\n+.0123456789=>|" + LETTERS
