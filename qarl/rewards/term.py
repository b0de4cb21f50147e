"""What a reward term is: one number for one completion, from the completion and its prompt's row."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from qarl.config import Config
from qarl.errors import ConfigurationError, RunError
from qarl.records import Completion, Group, Prompt


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a completion has no value; never the same as a value of 0."""

    reason: str


Outcome = float | Failure


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

    @abstractmethod
    def score(self, prompt: Prompt, completion: Completion) -> float:
        """The value of one completion; an exception means that it has none."""

    def score_group(self, group: Group) -> list[Outcome]:
        """One outcome for every completion, in order."""
        return [self._attempt(group.prompt, completion) for completion in group.completions]

    def _attempt(self, prompt: Prompt, completion: Completion) -> Outcome:
        try:
            return self.score(prompt, completion)
        except (ConfigurationError, RunError):
            raise
        # Verifiers are other people's code: whatever one raises is recorded with its completion and counted.
        except Exception as error:
            return failure(error)


def failure(error: Exception) -> Failure:
    """The type and message of an exception, in one line."""
    return Failure(f"{type(error).__name__}: {' '.join(str(error).split())}")


def column(prompt: Prompt, name: str, term: str) -> Any:
    """A column of the prompt's row; its absence is a fault of the configuration, not of a completion."""
    row: Mapping[str, Any] = prompt.row
    if row.get(name) is None:
        problem = "is empty in" if name in row else "is missing from"
        raise ConfigurationError(
            f"reward {term}: column `{name}` {problem} the row of prompt {prompt.id}, which has "
            f"{', '.join(row) or 'no columns'}; fill it in, or (for files) name it with prompts.answer_column"
        )
    return row[name]
