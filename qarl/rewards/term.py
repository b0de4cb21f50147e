"""What a reward term is: one number for one completion, from the completion and its prompt's row."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from qarl.config import Config
from qarl.errors import ConfigurationError, RunError, printable
from qarl.records import Completion, ErrorKind, Group, Prompt

LARGEST = torch.finfo(torch.float32).max
"""Rewards are float32: what is larger would be infinite."""

MOST_CHARACTERS = 300
"""Of what is told about one failure."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a completion has no value; never the same as a value of 0."""

    kind: ErrorKind
    reason: str


Outcome = float | Failure | None
"""None: the term does not apply to the completion, and adds nothing to its reward."""


class InvalidValue(ValueError):
    """What a term returned is no reward."""


class Term(Config, ABC):
    """A reward term: its configuration and its work. It holds no state, so it can be sent to another process."""

    type: str
    weight: float = Field(default=1.0, description="Factor in the sum of all terms; 0 only watches.")
    name: str | None = Field(
        default=None,
        pattern="^[A-Za-z][A-Za-z0-9_]*$",
        description="Name in metrics and logs (`reward/<name>`); without it, the type.",
    )

    @property
    def label(self) -> str:
        return self.name or self.type

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of a prompt's row without which the term cannot work."""
        return ()

    def prepare(self) -> None:
        """Raise a ConfigurationError where the term cannot work (a library or function is missing)."""

    def check(self, prompt: Prompt) -> None:
        """Raise a ConfigurationError where completions of this prompt could not be scored, because of its row."""
        for name in self.columns:
            column(prompt, name, self.label)

    @abstractmethod
    def score(self, prompt: Prompt, completion: Completion) -> float:
        """The value of one completion; an exception means that it has none."""

    def score_group(self, group: Group) -> list[Outcome]:
        """One outcome for every completion, in order."""
        return [self._attempt(group.prompt, completion) for completion in group.completions]

    def _attempt(self, prompt: Prompt, completion: Completion) -> Outcome:
        try:
            return as_number(self.score(prompt, completion))
        # Running out of memory is no fault of the completion in our own process, and ends a worker.
        except (ConfigurationError, RunError, MemoryError):
            raise
        # Verifiers are other people's code: whatever one raises is recorded with its completion and counted.
        except Exception as error:
            return failure(error)


class ForeignTerm(Term):
    """A term that runs other people's code: in worker processes, where it may hang, crash or take all memory."""

    timeout: float = Field(
        default=30.0,
        gt=0.0,
        le=3600.0,
        description="Seconds for one completion (for a whole group with style = trl); then its worker process is "
        "killed, and it has no reward.",
    )
    memory_mb: int = Field(
        default=2048,
        ge=64,
        description="Megabytes that a worker process may take beyond what it starts with; past them there is no "
        "reward. Held to on Linux only.",
    )

    def preload(self) -> None:
        """Load what all workers of the term can share, where it is there. Runs none of the user's code."""

    def calls(self, group: Group) -> list[Group]:
        """The group in parts, each of which is one call with a time limit of its own: here single completions."""
        return [Group(group.prompt, (completion,)) for completion in group.completions]


def as_number(value: object) -> float:
    """A finite float of a Python, NumPy or torch number; InvalidValue for anything else says what it is."""
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise InvalidValue(f"returned {value!r} ({type(value).__name__}), not a number")
    size: Any = abs(value)
    if not size <= LARGEST:
        raise InvalidValue(f"returned {value!r}; a reward must be finite, in 32 bits")
    return float(value)


def failure(error: BaseException) -> Failure:
    """What an exception means for the completion; its type and message, in one line."""
    if isinstance(error, InvalidValue):
        return Failure("invalid", one_line(str(error)))
    kind: ErrorKind = "timeout" if isinstance(error, TimeoutError) else "exception"
    return Failure(kind, one_line(f"{type(error).__name__}: {error}"))


def one_line(text: str) -> str:
    """Without line ends, and cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]} ..."


def column(prompt: Prompt, name: str, term: str) -> Any:
    """A column of the prompt's row; its absence is a fault of the configuration, not of a completion."""
    row: Mapping[str, Any] = prompt.row
    if row.get(name) is None:
        problem = "is empty in" if name in row else "is missing from"
        names = printable(", ".join(row)) or "no columns"
        raise ConfigurationError(
            f"reward {term}: column `{name}` {problem} the row of prompt {prompt.id}, which has "
            f"{names}; fill it in, or (for files) name it with prompts.answer_column"
        )
    return row[name]
