"""The two ways a run can end badly; everything else that escapes is a bug of ours."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigurationError(ValueError):
    """Something the user asked for cannot be done: says what, where, the rule and the remedy. Exit code 2."""


class RunError(RuntimeError):
    """A run that began cannot go on, or stopped itself: says why and what was saved. Exit code 1."""


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of a message, "; did you mean 'lr'?", for the nearest known words; nothing where none is near."""
    near = get_close_matches(word, list(known))
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def printable(line: str) -> str:
    """Line ends and the like, which a user's keys may hold, as Python writes them: a problem has one line."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)
