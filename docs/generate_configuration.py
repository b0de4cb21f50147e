"""Write `configuration.md` from the configuration classes: python docs/generate_configuration.py"""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from qarl.config import Config
from qarl.explain import members, tag_of
from qarl.recipe import Recipe

PAGE = Path(__file__).with_name("configuration.md")

INTRODUCTION = """\
# Configuration

<!-- Written by docs/generate_configuration.py from the configuration classes; change those instead. -->

A run is a TOML recipe; every key can be overridden on the command line:

```
qarl train recipes/quickstart.toml --learner.lr=2e-5 --steps=30 --rewards.0.weight=2 --objective.type=grpo
```

- Values are TOML; what is not valid TOML is taken as a string (`--model=./folder`).
- A number is a position in a list, counted from 0; the position after the last adds an entry.
- A key that contains dots is quoted: `--quant.rules."*.down_proj"=none`.
- Where a table has a `type`, overriding it with another type starts that table afresh: the settings of the old type
  mean nothing to the new one.
- An unknown key, a wrong type and a value out of range are errors. There is no `top_p`, `top_k` or `min_p`: the
  learner's log-probabilities are over the whole vocabulary, and a truncated distribution would be another policy.
- `qarl train RECIPE --dry-run` shows the resolved recipe, with all defaults; a run keeps it as `recipe.toml`.
"""


def page() -> str:
    """The whole page."""
    tables = [name for name, field in Recipe.model_fields.items() if members(field.annotation)]
    plain = [name for name in Recipe.model_fields if name not in tables]
    parts = [INTRODUCTION, "## Top-level keys\n", _table(Recipe, plain)]
    for name in tables:
        parts += _sections(name, Recipe.model_fields[name])
    return "\n".join(parts)


def _sections(key: str, field: FieldInfo) -> Iterator[str]:
    """One table of the recipe: its choices if it is one, then the tables inside it.

    The defaults of a plain table's keys are those of the table's own default.
    """
    listed = get_origin(field.annotation) is tuple
    heading = f"[[{key}]]" if listed else f"[{key}]"
    yield f"## `{heading}`\n"
    yield f"{field.description}\n"
    choices = members(field.annotation)
    default = _default_type(field)
    for choice in choices:
        if _is_tagged(choice):
            mark = " (default)" if tag_of(choice) == default else ""
            yield f'### `{key}.type = "{tag_of(choice)}"`{mark}\n'
        yield f"{_summary(choice)}\n"
        names = [name for name in choice.model_fields if name != "type" or not _is_tagged(choice)]
        whole = field.get_default(call_default_factory=True)
        yield _table(choice, names, whole if type(whole) is choice and not _is_tagged(choice) else None)
    nested = {
        name: inner for choice in choices for name, inner in choice.model_fields.items() if members(inner.annotation)
    }
    for name, inner in nested.items():
        yield from _sections(f"{key}.{name}", inner)


def _table(owner: type[Config], names: list[str], whole: Config | None = None) -> str:
    """Key, type, default and meaning of a class's fields; defaults as `whole` has them, if given."""
    rows = [_row(name, owner.model_fields[name], whole) for name in names]
    if not rows:
        return "No settings.\n"
    return "\n".join(["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows]) + "\n"


def _row(name: str, field: FieldInfo, whole: Config | None) -> str:
    meaning = (field.description or "").replace("|", "\\|")
    is_plain = whole is not None and not isinstance(getattr(whole, name), BaseModel | None)
    default = f"`{_toml(getattr(whole, name))}`" if is_plain else _default(field)
    return f"| `{name}` | {_kind(field.annotation)} | {default} | {meaning} |"


def _kind(kind: Any) -> str:
    """A type in the words of TOML."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _kind(arguments[0])
    if members(kind):
        return "list of tables" if origin is tuple else "table"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(argument) for argument in arguments if argument is not type(None))
    if origin is tuple:
        return f"list of {_kind(arguments[0])}"
    if origin is dict:
        return "table"
    return {str: "string", int: "integer", float: "number", bool: "true or false"}[kind]


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "-"
    if isinstance(value, BaseModel):
        return f"`{tag}`" if (tag := _default_type(field)) else "see there"
    return f"`{_toml(value)}`"


def _is_tagged(choice: type[Config]) -> bool:
    """Whether `type` names the class, and is no setting of its own."""
    return "type" in choice.model_fields and not choice.model_fields["type"].description


def _default_type(field: FieldInfo) -> str | None:
    value = field.get_default(call_default_factory=True)
    return tag_of(type(value)) if isinstance(value, Config) and _is_tagged(type(value)) else None


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return str(value)


def _summary(choice: type[Config]) -> str:
    return inspect.cleandoc(choice.__doc__ or "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
