"""Recipes of any content: a recipe that survives being written, or one line for every problem; never anything else."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from qarl.config import Config
from qarl.errors import ConfigurationError
from qarl.recipe import Recipe, load_recipe, to_toml

FUZZ = settings.get_profile("fuzz")  # of conftest.py

SMOKE = Path(__file__).resolve().parents[2] / "recipes" / "smoke.toml"

SPOIL = Callable[[st.DataObject, Any], Any]

TEXTS = st.sampled_from(["answer", "held_out", "a.b", "w8a8-int8", "none", "x y", "ß", "*.q_proj", "tiny", "\t"])


def tables(owner: type[Config]) -> st.SearchStrategy[dict[str, Any]]:
    """Tables of a class with every required key and some of the others, each of its kind and within its bounds."""
    required, optional = {}, {}
    for name, field in owner.model_fields.items():
        chosen = required if field.is_required() or name == "type" else optional
        chosen[name] = of_field(field)
    return st.fixed_dictionaries(required, optional=optional)


def of_field(field: FieldInfo) -> st.SearchStrategy[Any]:
    if field.annotation is str and any(getattr(rule, "pattern", None) for rule in field.metadata):
        return st.sampled_from(["held_out", "a", "x-1"])
    return of_kind(field.annotation, list(field.metadata))


def of_kind(kind: Any, rules: list[Any]) -> st.SearchStrategy[Any]:
    """Values of a type, within the bounds that pydantic keeps as `rules`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return of_kind(arguments[0], [*rules, *arguments[1:]])
    if isinstance(kind, type) and issubclass(kind, Config):
        return tables(kind)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple:
        inner = [of_kind(argument, []) for argument in arguments if argument is not Ellipsis]
        return st.lists(inner[0], min_size=1, max_size=2) if Ellipsis in arguments else st.tuples(*inner).map(list)
    if origin is list:
        return st.lists(of_kind(arguments[0], []), min_size=1, max_size=2)
    if origin is dict:
        return st.dictionaries(TEXTS, of_kind(arguments[1], []), max_size=2)
    if arguments:
        return st.one_of([of_kind(argument, []) for argument in arguments if argument is not NoneType])
    return plain(kind, rules)


def plain(kind: Any, rules: list[Any]) -> st.SearchStrategy[Any]:
    bounds = {
        name: bound for rule in rules for name in ("ge", "gt", "le", "lt") if (bound := _bound(rule, name)) is not None
    }
    least, most = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if kind is bool:
        return st.booleans()
    if kind is int:
        smallest = -9 if least is None else int(least)
        return st.integers(smallest, max(10**6, 2 * smallest) if most is None else int(most))
    if kind is float:
        low, high = -9.0 if least is None else float(least), 1e9 if most is None else float(most)
        whole: list[float] = [value for value in (0, 1, 2) if low < value < high] or [low + (high - low) / 2]
        within = st.floats(low, high, exclude_min="gt" in bounds, exclude_max="lt" in bounds)
        return within | st.sampled_from(whole)
    if kind is str:
        return TEXTS
    assert kind is Any, kind
    numbers = st.integers(-3, 10**20) | st.floats(-1, 1)
    return st.booleans() | numbers | TEXTS | st.lists(st.integers(), max_size=2)


def _bound(rule: Any, name: str) -> float | None:
    """A rule is an annotation with this attribute, or a nested field with rules of its own."""
    inner = [bound for one in getattr(rule, "metadata", []) if (bound := _bound(one, name)) is not None]
    return inner[0] if inner else getattr(rule, name, None)


def try_recipe(content: bytes, overrides: tuple[str, ...] = ()) -> Recipe | None:
    """Load it; a recipe must survive being written, and a refusal have one line for every problem."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "recipe.toml")
        path.write_bytes(content)
        try:
            recipe = load_recipe(path, overrides)
        except ConfigurationError as error:
            for line in str(error).split("\n"):
                assert line.isprintable() and ": " in line
                assert str(path) in line or overrides
            return None
        path.write_text(to_toml(recipe), encoding="utf-8")
        assert load_recipe(path) == recipe
        return recipe


@settings(FUZZ, max_examples=200 * FUZZ.max_examples)
@given(data=st.data())
def test_a_recipe_with_anything_in_it(spoil_values: SPOIL, data: st.DataObject) -> None:
    table = spoil_values(data, data.draw(tables(Recipe)))
    if isinstance(table, dict):
        try_recipe(tomli_w.dumps(without_none(table)).encode())


def without_none(tree: Any) -> Any:
    """TOML has no null."""
    if isinstance(tree, dict):
        return {key: without_none(value) for key, value in tree.items() if value is not None}
    return [without_none(value) for value in tree if value is not None] if isinstance(tree, list) else tree


@settings(FUZZ, max_examples=150 * FUZZ.max_examples)
@given(data=st.data())
def test_a_recipe_with_damaged_bytes(spoil_bytes: SPOIL, data: st.DataObject) -> None:
    try_recipe(spoil_bytes(data, SMOKE.read_bytes()))


@settings(FUZZ, max_examples=200 * FUZZ.max_examples)
@given(data=st.data())
def test_any_words_on_the_command_line(data: st.DataObject) -> None:
    parts = st.sampled_from(
        ["steps", "learner", "lr", "rewards", "0", "1", "9", "-1", "type", "prompts", "objective", "kl", "coef",
         "rules", "quant", '"*.q"', "eval", "", " ", '"', "ß", "template_args", "x", "betas", "optimizer"]
    )  # fmt: skip
    keys = st.lists(parts, min_size=1, max_size=4).map(".".join)
    values = st.sampled_from(
        ["1", "-1", "1e-5", "nan", "inf", "true", "none", "grpo", '"a"', "'", "[1, 2]", "{a = 1}", "{", "2024-01-01",
         "", "=", "9" * 5000, "[" * 5000, "\n", "\x00", "--x"]
    )  # fmt: skip
    words = data.draw(st.lists(st.builds("--{}={}".format, keys, values) | keys | values, max_size=3))
    try_recipe(SMOKE.read_bytes(), tuple(words))


@pytest.mark.parametrize(
    "content",
    [b"a = " + b"[" * 100_000, b"a = " + b"9" * 10_000, b"a" + b".a" * 10_000 + b" = 1", b"\xff\xfe", b"\x00", b"= 1"],
    ids=["brackets", "digits", "dots", "bytes", "NUL", "no key"],
)
def test_files_without_end_or_sense(content: bytes) -> None:
    assert try_recipe(content) is None


def test_values_within_their_bounds() -> None:
    """Most tables of them break some rule between keys; some must not, or the search would see refusals only."""
    found = []

    @settings(FUZZ, max_examples=150 * FUZZ.max_examples)
    @given(table=tables(Recipe))
    def search(table: dict[str, Any]) -> None:
        found.append(try_recipe(tomli_w.dumps(table).encode()) is not None)

    search()
    assert sum(found) > len(found) / 20
