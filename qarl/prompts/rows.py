"""A row of a source: what is asked, and every column rewards may read. TRL's and verl's layouts are both rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from qarl.errors import ConfigurationError, suggestion

ANSWER_COLUMNS = ("answer", "reward_model.ground_truth")
"""Where an answer is looked for when no column is named: TRL's usual name, then verl's."""


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
            columns = {**columns, "answer": answer}
        return Row(id, content, columns, where)


def find_answer_column(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """The first of `ANSWER_COLUMNS` that any row has, or None: not every reward needs an answer."""
    rows = list(rows)
    for name in ANSWER_COLUMNS:
        if any(_lookup(columns, name) is not None for columns in rows):
            return name
    return None


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
    if value is None or value == "":
        problem = "is empty" if name in columns else "is missing"
        filled = [other for other, content in columns.items() if content not in (None, "")]
        raise ConfigurationError(
            f"{where}: column `{name}` {problem}; the row has {', '.join(filled) or 'no columns'}. "
            f"Fill the column in, or name another with {key}{suggestion(name, filled)}"
        )
    return value


def _content(value: Any, column: str, where: str) -> Content:
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not value:
        raise ConfigurationError(
            f"{where}: column `{column}` is {_kind(value)}; a prompt is a text or a non-empty list of chat messages "
            '[{"role": "user", "content": "..."}]'
        )
    return tuple(_message(message, f"{where}: column `{column}`, message {n}") for n, message in enumerate(value, 1))


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f'{where} is {_kind(value)}; a message is {{"role": "user", "content": "..."}}')
    for key in ("role", "content"):
        if not isinstance(value.get(key), str):
            found = _kind(value[key]) if key in value else "missing"
            raise ConfigurationError(f"{where}: `{key}` is {found}; it must be a text (images and audio are not read)")
    return Message(role=value["role"], content=value["content"])


def _kind(value: Any) -> str:
    return "empty" if value is None or value == [] else f"of type {type(value).__name__}"
