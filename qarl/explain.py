"""What is wrong with a configuration, one line a problem: where, which key, the value, the rule, the remedy."""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from qarl.config import Config
from qarl.errors import printable

ABSENT_ON_PURPOSE = dict.fromkeys(
    ("top_p", "top_k", "min_p"),
    "training samples from the whole distribution: the learner's log-probabilities are over the full vocabulary, so a "
    "truncated one would be another policy; remove the key",
)
"""Keys people know from elsewhere, and why there is no such key here."""


@dataclass(frozen=True, slots=True)
class Place:
    """A dotted key, the class that owns it, and for a known key its field and the kind of value it holds."""

    key: str
    owner: type[Config]
    field: FieldInfo | None
    kind: Any


def problems(error: ValidationError, root: type[Config], source_of: Callable[[str], str]) -> list[str]:
    """One line for every problem; `source_of(key)` names the file or option the key's value came from."""
    rules: dict[str, list[str]] = {}
    for details in error.errors(include_url=False):
        place = locate(details["loc"], root)
        where = source_of(place.key)
        shown = f"{place.key} = {_brief(details['input'])}" if _shows_value(details) else place.key
        # A value that may be of several kinds breaks one rule of each.
        rules.setdefault(": ".join(filter(None, (where, shown))), []).append(_rule(details, place))
    return [printable(": ".join(filter(None, (place, " or ".join(broken))))) for place, broken in rules.items()]


def locate(location: Sequence[int | str], root: type[Config]) -> Place:
    """Walk the configuration classes along a location of pydantic's, which also names the chosen union members."""
    keys: list[str] = []
    owner, field = root, None
    kind: Any = root
    for part in location:
        kind = _bare(kind)
        chosen = [member for member in members(kind) if tag_of(member) == part]
        if is_choice(kind) and chosen:
            kind = chosen[0]
            continue
        if _is_plain_union(kind):
            continue  # the part names a member of the union, which is no key
        keys.append(str(part))
        owners = [member for member in _classes(kind) if part in member.model_fields] or _classes(kind)
        if owners:
            owner, field = owners[0], owners[0].model_fields.get(str(part))
            kind = None if field is None else field.annotation
        else:
            kind = next(iter(get_args(kind)), None)
    return Place(".".join(keys), owner, field, _bare(kind))


def is_choice(kind: Any) -> bool:
    """Whether this is a union of configuration classes, told apart by their `type`."""
    return len(_classes(kind)) > 1


def members(kind: Any) -> list[type[Config]]:
    """The configuration classes a field may hold: one, the members of a union, or the items of a tuple."""
    kind = _bare(kind)
    if _is_config(kind):
        return [kind]
    return [member for argument in get_args(kind) for member in members(argument)]


def tag_of(choice: type[Config]) -> str | None:
    """The `type` by which a union tells this class apart."""
    field = choice.model_fields.get("type")
    return None if field is None else str(field.default)


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """` did you mean 'lr'? known: lr, ...`, ready to follow a rule."""
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known: {', '.join(known)}"


def _rule(details: ErrorDetails, place: Place) -> str:
    kind, context = details["type"], details.get("ctx", {})
    message = re.sub(r"^\w+ should", "must", details["msg"]).replace(" after validation", "").replace("tuple", "list")
    if _is_plain_union(place.kind):
        return message
    if kind == "extra_forbidden":
        name = place.key.rpartition(".")[2]
        if name in ABSENT_ON_PURPOSE:
            return ABSENT_ON_PURPOSE[name]
        return f"unknown key; {did_you_mean(name, list(place.owner.model_fields))}"
    if kind == "missing":
        return f"is required{_meaning(place)}"
    if kind == "union_tag_invalid":
        known = [word.strip("'") for word in context["expected_tags"].split(", ")]
        return f"unknown type {context['tag']!r}; {did_you_mean(context['tag'], known)}"
    if kind == "union_tag_not_found":
        return f"needs a type; known: {', '.join(_tags(place))}"
    if kind == "literal_error":
        known = [str(value) for value in get_args(place.field.annotation)] if place.field else []
        return f"not a known value; {did_you_mean(str(details['input']), known)}"
    if kind == "value_error":
        return str(context["error"])
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        is_name = is_choice(place.kind) and isinstance(details["input"], str)
        return "must be a table of keys" + (f"; write {place.key}.type = {details['input']!r}" if is_name else "")
    return message + _meaning(place)


def _meaning(place: Place) -> str:
    return f" ({place.field.description})" if place.field is not None and place.field.description else ""


def _tags(place: Place) -> Iterator[str]:
    if place.field is not None:
        yield from (tag for member in members(place.field.annotation) if (tag := tag_of(member)) is not None)


def _shows_value(details: ErrorDetails) -> bool:
    hidden = ("missing", "union_tag_invalid", "union_tag_not_found")
    # What a whole table breaks is said in terms of its keys.
    is_whole_table = details["type"] == "value_error" and isinstance(details["input"], dict)
    return bool(details["loc"]) and details["type"] not in hidden and not is_whole_table


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _bare(kind: Any) -> Any:
    """Without `Annotated` and without the None of an optional."""
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    if _is_union(kind):
        real = [argument for argument in get_args(kind) if argument is not type(None)]
        return _bare(real[0]) if len(real) == 1 else kind
    return kind


def _classes(kind: Any) -> list[type[Config]]:
    """The configuration classes that a table at this place may be."""
    kind = _bare(kind)
    if _is_config(kind):
        return [kind]
    return [member for member in get_args(kind) if _is_config(member)] if _is_union(kind) else []


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType)


def _is_plain_union(kind: Any) -> bool:
    """Of values rather than tables: `bool | Literal["auto"]`."""
    return _is_union(kind) and not _classes(kind)


def _is_config(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Config)
