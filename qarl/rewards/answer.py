"""Extract the final answer of a completion and compare it with the row's `answer`."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from qarl.errors import ConfigurationError
from qarl.records import Completion, Prompt
from qarl.rewards.extract import Where, compiled, conclusion, final_answer, has_marker, last_line
from qarl.rewards.quantity import Quantity, numbers_in, plain, quantity, same_quantity
from qarl.rewards.term import Term, column

_MORE_THAN_A_NUMBER = re.compile(
    r"\\|[±√π]|\w[-+][0-9]|\w [-+] (?:[0-9]|[a-z]\b)"
    r"|\b(?:not|never|nor|\w+n't|minus|plus|negative|half|pi|sqrt|(?:square|cube) root|sin|cos|tan|log|ln|exp|mod)\b",
    re.IGNORECASE,
)
"""What makes of the number in a text another one ("minus 7", "\\pm 7", "7 and a half", "not 7")."""


class Answer(Term):
    """1 for a right answer, 0 for a wrong or missing one."""

    type: Literal["answer"] = "answer"
    extract: Where = Field(
        default="auto",
        description="Where the answer stands: boxed (`\\boxed{}`), hash (`####`), label (after `answer:`), "
        "last_number, regex, text (everything), or auto: the first of boxed, hash, label that occurs, else the last "
        "number.",
    )
    pattern: str | None = Field(
        default=None,
        description="For extract = regex: group 1 of the last match is the answer. Syntax of the `regex` library.",
    )
    tolerance: float = Field(default=0.0, ge=0.0, lt=1.0, description="Allowed relative difference of numbers.")
    finished_only: bool = Field(default=False, description="A completion cut off by the length limit gets 0.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.extract == "regex") != (self.pattern is not None):
            raise ValueError('extract = "regex" and pattern belong together; set both or neither')
        if self.pattern is not None:
            compiled(self.pattern)
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        return ("answer",)

    def check(self, prompt: Prompt) -> None:
        super().check(prompt)
        reference_answers(column(prompt, "answer", self.label), prompt.id, self.label)

    def score(self, prompt: Prompt, completion: Completion) -> float:
        references = reference_answers(column(prompt, "answer", self.label), prompt.id, self.label)
        if self.finished_only and completion.finish_reason != "stop":
            return 0.0
        return float(any(self.is_right(completion.text, reference) for reference in references))

    def is_right(self, text: str, reference: str) -> bool:
        """Whether the answer found in `text` is `reference`; what was thought before does not count."""
        if self.extract not in ("regex", "text"):
            text = conclusion(text)
        if self.extract == "auto" and not has_marker(text) and reference_number(reference) is None:
            found = last_line(text)
        else:
            found = final_answer(text, self.extract, self.pattern)
        return found is not None and same_answer(found, reference, self.tolerance)


def same_answer(found: str, reference: str, tolerance: float = 0.0) -> bool:
    """Equal as numbers where the reference is one, else equal as texts but for case, spaces and decoration."""
    expected = reference_number(reference)
    if expected is None:
        return normalized(found) == normalized(reference)
    given = stated_number(found)
    return given is not None and same_quantity(given, expected, tolerance)


def reference_number(text: str) -> Quantity | None:
    """The number that a reference answer is ("42 km", "x = 5"), or None: it is a text ("CO2")."""
    return quantity(text) or quantity(_right_side(text))


def stated_number(text: str) -> Quantity | None:
    """The one number that a text states: all of it, or after its last "=", or the only number in it.

    Two different numbers ("7 or 8") state none, nor does one that the words change ("minus 7").
    """
    text = plain(text)
    whole = quantity(text)
    if whole is not None:
        return whole
    if "=" in text:
        return stated_number(_right_side(text))
    if _MORE_THAN_A_NUMBER.search(text):
        return None
    if not re.search("[A-Za-z]{2}", text):
        # A formula such as "2*(3+4)" contains numbers but is none.
        return None
    stated = {quantity(written) for written in numbers_in(text)}
    return stated.pop() if len(stated) == 1 else None


def _right_side(text: str) -> str:
    """What an equation ends in; nothing of several ("x = 7, y = 8")."""
    left, _, right = text.rpartition("=")
    return "" if re.search(r"[,;]|\b(?:and|or)\b", left) else right


def normalized(text: str) -> str:
    """Lower case, without spaces, LaTeX's text commands, Markdown emphasis and final punctuation."""
    text = re.sub(r"\s", "", plain(text).lower()).strip("$*_`\"'").rstrip(".,;!")
    choice = re.fullmatch(r"[(\[]?([a-z])[)\].]?", text)
    return choice[1] if choice else text


def reference_answers(value: Any, prompt_id: str, term: str) -> list[str]:
    """The accepted answers of a row as texts: one, or a list of them; GSM8K's `####` and `\\boxed{}` are unwrapped."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values or not all(isinstance(one, str | int | float) and str(one).strip() for one in values):
        raise ConfigurationError(
            f"reward {term}: the answer of prompt {prompt_id} is {value!r}; it must be a text, a number, or a list of "
            "them; correct the row or name another column with prompts.answer_column"
        )
    return [_unwrapped(str(one)) for one in values]


def _unwrapped(reference: str) -> str:
    for where in ("boxed", "hash"):
        found = final_answer(reference, "boxed" if where == "boxed" else "hash")
        if found is not None:
            return found
    return reference.strip()
