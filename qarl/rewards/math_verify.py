"""Mathematical equivalence by the `math_verify` library."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from qarl.errors import ConfigurationError
from qarl.records import Completion, Prompt
from qarl.rewards.answer import reference_answers
from qarl.rewards.extract import last_boxed
from qarl.rewards.term import Term, column


class MathVerify(Term):
    """1 when the completion's last expression equals the row's `answer` mathematically, else 0.

    The library's own time limits use a signal that only a process's main thread may set; they are off, so that the
    term works in any thread.
    """

    type: Literal["math_verify"] = "math_verify"
    max_characters: int = Field(
        default=4000, ge=1, description="Only this many last characters of a completion are read, to bound the time."
    )

    @property
    def columns(self) -> tuple[str, ...]:
        return ("answer",)

    def prepare(self) -> None:
        _library(self.label)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        library = _library(self.label)
        references = [
            self._parsed_reference(library, reference, prompt)
            for reference in reference_answers(column(prompt, "answer", self.label), prompt.id, self.label)
        ]
        text = completion.text[-self.max_characters :]
        if "\\boxed" in text and last_boxed(text) is None:
            return 0.0
        given = library.parse(text, parsing_timeout=None)
        return float(any(library.verify(one, given, timeout_seconds=None) for one in references))

    def _parsed_reference(self, library: Any, reference: str, prompt: Prompt) -> Any:
        for spelling in (reference, f"${reference}$"):
            parsed = library.parse(spelling, parsing_timeout=None)
            # A lone text means that the library found nothing it could compute with.
            if any(not isinstance(one, str) for one in parsed):
                return parsed
        raise ConfigurationError(
            f"reward {self.label}: math_verify reads no expression in the answer {reference!r} of prompt {prompt.id}; "
            "correct the row, or use the reward `answer`"
        )


def _library(term: str) -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise ConfigurationError(
            f"reward {term} needs the math-verify library; install it with: pip install 'qarl-llm[demo]'"
        ) from error
    return math_verify
