"""Where a problem is said to be, and what is said about it."""

from typing import Annotated, Literal, Self

import pytest
from pydantic import Field, ValidationError, model_validator

from qarl.config import Config
from qarl.explain import did_you_mean, is_choice, locate, problems


class Circle(Config):
    type: Literal["circle"] = "circle"
    radius: float = Field(1.0, gt=0.0, description="Half the width.")


class Square(Config):
    type: Literal["square"] = "square"
    side: int = Field(1, description="Length of an edge.")


Shape = Annotated[Circle | Square, Field(discriminator="type")]


class Pen(Config):
    colour: Literal["black", "blue"] = "black"


class Frame(Config):
    outer: int
    inner: int

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if self.inner > self.outer:
            raise ValueError(f"inner {self.inner} is above outer {self.outer}")
        return self


class Drawing(Config):
    title: str = Field(min_length=1, description="What it shows.")
    frame: Frame | None = None
    border: bool | Literal["auto"] = "auto"
    authors: tuple[str, ...] = Field(("anonymous",), strict=False, min_length=1, description="Who drew it.")
    main: Shape = Field(default_factory=Circle)
    others: tuple[Shape, ...] = Field((), strict=False)
    pen: Pen | None = None


def lines(table: dict[str, object]) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Drawing.model_validate({"title": "t"} | table)
    return problems(caught.value, Drawing, lambda key: f"in:{key}")


def test_an_unknown_key_names_the_nearest_known_one() -> None:
    assert lines({"main": {"type": "circle", "radios": 2.0}}) == [
        "in:main.radios: main.radios = 2.0: unknown key; did you mean 'radius'? known: type, radius"
    ]


def test_a_value_out_of_range_comes_with_the_rule_and_the_key_s_meaning() -> None:
    assert lines({"others": [{"type": "square"}, {"type": "circle", "radius": 0}]}) == [
        "in:others.1.radius: others.1.radius = 0: must be greater than 0 (Half the width.)"
    ]


def test_a_table_that_contradicts_itself_is_not_printed_whole() -> None:
    assert lines({"frame": {"outer": 1, "inner": 2}}) == ["in:frame: frame: inner 2 is above outer 1"]


def test_a_text_out_of_range_comes_with_the_rule() -> None:
    assert lines({"title": ""}) == ["in:title: title = '': must have at least 1 character (What it shows.)"]


def test_a_value_of_several_kinds_has_one_line_with_every_rule() -> None:
    assert lines({"border": "thick"}) == ["in:border: border = 'thick': must be a valid boolean or must be 'auto'"]


def test_a_list_that_is_too_short_is_called_a_list() -> None:
    assert lines({"authors": []}) == ["in:authors: authors = []: must have at least 1 item, not 0 (Who drew it.)"]
    assert lines({"authors": "me"}) == ["in:authors: authors = 'me': must be a valid list (Who drew it.)"]


def test_the_name_of_a_choice_in_place_of_its_table_is_shown_as_a_table() -> None:
    assert lines({"main": "circle"}) == [
        "in:main: main = 'circle': must be a table of keys; write main.type = 'circle'"
    ]


def test_an_unknown_choice_names_the_known_ones() -> None:
    assert lines({"main": {"type": "circel"}}) == [
        "in:main: main: unknown type 'circel'; did you mean 'circle'? known: circle, square"
    ]


def test_a_choice_without_a_type_names_the_known_ones() -> None:
    assert lines({"main": {"radius": 1.0}}) == ["in:main: main: needs a type; known: circle, square"]


def test_a_literal_names_its_values() -> None:
    assert lines({"pen": {"colour": "blak"}}) == [
        "in:pen.colour: pen.colour = 'blak': not a known value; did you mean 'black'? known: black, blue"
    ]


def test_a_missing_key_says_what_it_is_for() -> None:
    with pytest.raises(ValidationError) as caught:
        Drawing.model_validate({})
    assert problems(caught.value, Drawing, lambda key: "") == ["title: is required (What it shows.)"]


def test_a_key_from_elsewhere_is_explained() -> None:
    assert "would be another policy" in lines({"pen": {"top_p": 0.9}})[0]


def test_every_problem_has_one_line() -> None:
    assert len(lines({"main": {"type": "square", "side": 1.5}, "pen": 3})) == 2


@pytest.mark.parametrize(
    ("location", "key", "owner"),
    [
        (("main", "circle", "radius"), "main.radius", Circle),
        (("main", "side"), "main.side", Square),
        (("others", 1, "square", "side"), "others.1.side", Square),
        (("pen", "colour"), "pen.colour", Pen),
        (("main", "circle", "nothing"), "main.nothing", Circle),
    ],
)
def test_a_location_leads_to_its_key_and_owner(location: tuple[int | str, ...], key: str, owner: type) -> None:
    place = locate(location, Drawing)
    assert (place.key, place.owner) == (key, owner)


def test_only_unions_are_choices() -> None:
    assert is_choice(locate(("main",), Drawing).kind)
    assert is_choice(locate(("others", 0), Drawing).kind)
    assert not is_choice(locate(("pen",), Drawing).kind)


def test_nothing_near_is_not_suggested() -> None:
    assert did_you_mean("zzz", ["lr", "seed"]) == "known: lr, seed"
