"""A row of a source: what is asked, and every column rewards may read, in TRL's, verl's or verifiers' layout."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from qarl.errors import ConfigurationError, printable, suggestion

PROMPT_COLUMNS = ("prompt", "question")
"""Where a prompt is looked for when no column is named: TRL's and verl's name, then that of verifiers."""

ANSWER_COLUMNS = ("answer", "reward_model.ground_truth")
"""Where an answer is looked for when no column is named: TRL's and verifiers' usual name, then verl's."""


class Message(TypedDict):
    role: str
    content: str


Content = str | tuple[Message, ...]
"""A plain text, or the messages of a chat."""


@dataclass(frozen=True, slots=True)
class Row:
    """One question before rendering. `where` says where it came from, for messages ("train.jsonl, line 17")."""

    id: str
    content: Content
    columns: Mapping[str, Any]
    where: str


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns hold the prompt and the answer; a dot goes into a nested column (`reward_model.ground_truth`)."""

    prompt: str
    answer: str | None

    def row(self, id: str, columns: Mapping[str, Any], where: str) -> Row:
        """Check one row and name its parts: the answer, where there is one, also becomes the column `answer`."""
        content = _content(_required(columns, self.prompt, where, "prompts.prompt_column"), self.prompt, where)
        if self.answer is not None:
            answer = _required(columns, self.answer, where, "prompts.answer_column")
            if isinstance(answer, str):
                checked_text(answer, f"{where}: column `{self.answer}`")
            columns = {**columns, "answer": answer}
        return Row(id, content, columns, where)


def find_columns(rows: Sequence[Mapping[str, Any]], prompt: str | None = None, answer: str | None = None) -> Columns:
    """The named columns; for one without a name the first of `PROMPT_COLUMNS` or `ANSWER_COLUMNS` that any row has.

    There may be no answer: not every reward needs one.
    """
    return Columns(
        prompt or _first_filled(rows, PROMPT_COLUMNS) or PROMPT_COLUMNS[0],
        answer or _first_filled(rows, ANSWER_COLUMNS),
    )


def checked_text(text: str, where: str) -> str:
    """The text itself; ConfigurationError for one that no tokenizer or person can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f"{where}: character {error.start + 1} is half of one (\\u{ord(text[error.start]):04x}, a lone surrogate); "
            "write the text again as UTF-8"
        ) from error
    if "\0" in text:
        raise ConfigurationError(
            f"{where}: character {text.index(chr(0)) + 1} is NUL (\\u0000), as in a damaged file; remove it"
        )
    return text


def _first_filled(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str | None:
    return next((name for name in names if any(_lookup(columns, name) is not None for columns in rows)), None)


def _lookup(columns: Mapping[str, Any], name: str) -> Any:
    """The value of a column, None where it is missing; an exact name wins over a dotted path."""
    if name in columns:
        return columns[name]
    value: Any = columns
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _required(columns: Mapping[str, Any], name: str, where: str, key: str) -> Any:
    value = _lookup(columns, name)
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigurationError(f"{where}: column `{name}` is {value}, which is no number; fill it in")
    if value is None or (isinstance(value, str) and not value.strip()):
        problem = "is empty" if name in columns else "is missing"
        filled = [other for other, content in columns.items() if content not in (None, "")]
        raise ConfigurationError(
            f"{where}: column `{name}` {problem}; the row has {printable(', '.join(filled)) or 'no columns'}. "
            f"Fill the column in, or name another with {key}{suggestion(name, filled)}"
        )
    return value


def _content(value: Any, column: str, where: str) -> Content:
    if isinstance(value, str):
        return checked_text(value, f"{where}: column `{column}`")
    if not isinstance(value, list | tuple) or not value:
        raise ConfigurationError(
            f"{where}: column `{column}` is {_kind(value)}; a prompt is a text or a non-empty list of chat messages "
            '[{"role": "user", "content": "..."}]'
        )
    messages = [_message(message, f"{where}: column `{column}`, message {n}") for n, message in enumerate(value, 1)]
    if not messages[-1]["content"].strip():
        raise ConfigurationError(f"{where}: column `{column}`, message {len(messages)}: `content` is empty; fill it in")
    return tuple(messages)


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f'{where} is {_kind(value)}; a message is {{"role": "user", "content": "..."}}')
    for key in ("role", "content"):
        if not isinstance(value.get(key), str):
            found = _kind(value[key]) if key in value else "missing"
            raise ConfigurationError(f"{where}: `{key}` is {found}; it must be a text (images and audio are not read)")
        checked_text(value[key], f"{where}, `{key}`")
    return Message(role=value["role"], content=value["content"])


def _kind(value: Any) -> str:
    return "empty" if value is None or value == [] else f"of type {type(value).__name__}"
