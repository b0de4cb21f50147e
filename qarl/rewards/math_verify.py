"""Mathematical equivalence by the `math_verify` library."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from typing import Any, Literal

from pydantic import Field

from qarl.errors import ConfigurationError
from qarl.records import Completion, Prompt
from qarl.rewards.answer import reference_answers, reference_number
from qarl.rewards.extract import conclusion, last_boxed
from qarl.rewards.term import ForeignTerm, column

_COMMAND = re.compile(r"\\[a-zA-Z]+(?:\s*\{\s*[a-zA-Z ()]*\})?")
_WORD = re.compile(r"(?!(?:sin|cos|tan|log|exp|sqrt)\b)\b[a-zA-Z]{3,}\b")
"""What the library takes for a product of letters."""


class MathVerify(ForeignTerm):
    """1 when the completion's last expression equals the row's `answer` mathematically, else 0.

    The library's own time limits are off: past them it would call an answer wrong that it could not judge, and they
    cannot stop a power of huge numbers.
    """

    type: Literal["math_verify"] = "math_verify"
    max_characters: int = Field(
        default=4000, ge=1, description="Only this many last characters of a completion are read, to bound the time."
    )

    @property
    def columns(self) -> tuple[str, ...]:
        return ("answer",)

    def preload(self) -> None:
        # Where the library is missing, `prepare` says so.
        with suppress(ConfigurationError):
            self.prepare()
            # Its first expressions take long, while it makes the tables of its parser.
            self.check(Prompt("", (), "", {"answer": r"\frac{1}{2}"}))

    def prepare(self) -> None:
        _library(self.label)
        # It warns that its time limits are off.
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def check(self, prompt: Prompt) -> None:
        super().check(prompt)
        self._references(_library(self.label), prompt)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        library = _library(self.label)
        references = self._references(library, prompt)
        text = conclusion(completion.text)[-self.max_characters :]
        if "\\boxed" in text and last_boxed(text) is None:
            return 0.0
        given = library.parse(text, parsing_timeout=None)
        return float(any(library.verify(one, given, timeout_seconds=None) for one in references))

    def _references(self, library: Any, prompt: Prompt) -> list[Any]:
        answers = reference_answers(column(prompt, "answer", self.label), prompt.id, self.label)
        return [self._parsed_reference(library, answer, prompt) for answer in answers]

    def _parsed_reference(self, library: Any, reference: str, prompt: Prompt) -> Any:
        spelling = spelled(reference)
        parsed = library.parse(spelling, parsing_timeout=None)
        # A lone text means that the library found nothing it could compute with; of a sentence it makes a product of
        # letters, which no completion equals.
        if any(not isinstance(one, str) for one in parsed) and len(_WORD.findall(_COMMAND.sub("", spelling))) < 2:
            return parsed
        raise ConfigurationError(
            f"reward {self.label}: math_verify reads no expression in the answer {reference!r} of prompt {prompt.id}; "
            "correct the row, or use the reward `answer`"
        )


def spelled(reference: str) -> str:
    """A reference as the library reads all of it: a number as a fraction, the rest as LaTeX.

    Of a bare text it takes the first or last number alone: 2 of `2\\pi`, 3 of `1, 2, 3`.
    """
    number = reference_number(reference)
    if number is not None and not number.percent:
        return f"${number.value}$"
    return reference if "$" in reference else f"${reference}$"


def _library(term: str) -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise ConfigurationError(
            f"reward {term} needs the math-verify library; install it with: pip install 'qarl-llm[demo]'"
        ) from error
    return math_verify
