"""Tables whose keys are patterns of names, as in a shell (* ? [abc]): of those that match a name, the last counts."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from qarl.errors import ConfigurationError


def deciding(names: Sequence[str], patterns: Collection[str], table: str, kind: str) -> dict[str, str | None]:
    """For every name the pattern that decides it, None where none matches.

    ConfigurationError for a pattern that decides nothing; `table` and `kind` say there whose it is and what it names.
    """
    found: dict[str, str | None] = {}
    for name in names:
        matching = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        found[name] = matching[-1] if matching else None
    for pattern in patterns:
        _check_decides(pattern, found, table, kind)
    return found


def family(name: str) -> str:
    """The name with every number that is a part of its own as `*`: `layers.3.mlp` is `layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _check_decides(pattern: str, decided: dict[str, str | None], table: str, kind: str) -> None:
    matched = [name for name in decided if fnmatchcase(name, pattern)]
    if not matched:
        families = sorted({family(name) for name in decided})
        near = get_close_matches(pattern, families, n=3, cutoff=0.3) or families[:3]
        raise ConfigurationError(f'{table} "{pattern}" matches no {kind}; they are named like {", ".join(near)}')
    if all(decided[name] != pattern for name in matched):
        raise ConfigurationError(
            f'{table} "{pattern}" has no effect: later ones, such as "{decided[matched[0]]}", decide every {kind} that '
            "it matches; put the more general pattern first"
        )
