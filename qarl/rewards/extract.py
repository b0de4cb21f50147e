r"""Where in a completion the final answer stands: `\boxed{}`, `####`, after "answer:", or the last number."""

from __future__ import annotations

import re
from typing import Literal

import regex

from qarl.errors import ConfigurationError
from qarl.rewards.quantity import numbers_in

Where = Literal["auto", "boxed", "hash", "label", "last_number", "regex", "text"]

_LABEL = re.compile(r"\banswer\b[\s*_`]*(?::|\bis\b:?)[\s*_`]*", re.IGNORECASE)

PATTERN_SECONDS = 5.0
"""What a user's pattern may take for one text, which some patterns can keep busy for ages; then TimeoutError."""


def final_answer(text: str, where: Where = "auto", pattern: str | None = None) -> str | None:
    r"""The answer as written, or None where the text has none in that place.

    auto: the first of `\boxed{}`, `####` and "answer:" that occurs at all decides, even when what follows is
    malformed, but "answer:" goes before a `####` above it, which is a heading; a text without any of them answers
    with its last number. Of several the last counts. regex: group 1
    (or all) of the last match of `pattern`. text: the whole text.
    """
    if where == "auto":
        where = _marker(text)
    if where == "boxed":
        return last_boxed(text)
    if where == "hash":
        return _first_line(text.rpartition("####")[2]) if "####" in text else None
    if where == "label":
        labels = list(_LABEL.finditer(text))
        return _first_line(text[labels[-1].end() :]) if labels else None
    if where == "last_number":
        return next(reversed(numbers_in(text)), None)
    if where == "regex":
        assert pattern is not None
        matches = list(compiled(pattern).finditer(text, timeout=PATTERN_SECONDS))
        return (matches[-1][1] if matches[-1].re.groups else matches[-1][0]) if matches else None
    return text.strip() or None


def compiled(pattern: str) -> regex.Pattern[str]:
    """A user's regular expression, of the library that has a time limit; one line for a wrong one."""
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ConfigurationError(f"pattern {pattern!r} is not a regular expression: {error}") from error


def conclusion(text: str) -> str:
    """What follows the last `</think>`; of a thought that never ends, nothing."""
    thought, _, rest = text.rpartition("</think>")
    return "" if not thought and "<think>" in text else rest


def has_marker(text: str) -> bool:
    r"""Whether a text says where its answer is: by `\boxed`, `####` or "answer:"."""
    return _marker(text) != "last_number"


def last_boxed(text: str) -> str | None:
    r"""What stands in the last `\boxed{...}`; None when there is none or its braces do not close."""
    start = text.rfind("\\boxed")
    if start < 0:
        return None
    opening = re.compile(r"\\boxed\s*\{").match(text, start)
    if opening is None:
        return None
    depth, position = 1, opening.end()
    while position < len(text):
        if text[position] == "\\":
            position += 1
        elif text[position] in "{}":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return text[opening.end() : position].strip() or None
        position += 1
    return None


def last_line(text: str) -> str | None:
    """The last line that is not empty."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _marker(text: str) -> Where:
    if "\\boxed" in text:
        return "boxed"
    if _LABEL.search(text.rpartition("####")[2]):
        return "label"
    return "hash" if "####" in text else "last_number"


def _first_line(text: str) -> str | None:
    stripped = text.strip()
    return stripped.splitlines()[0].strip() if stripped else None
