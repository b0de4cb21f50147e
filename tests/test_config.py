"""The base of configurations: strict, frozen, and deaf to nothing."""

import math
from typing import Any

import pytest
from pydantic import Field, ValidationError

from qarl.config import Config


class Oven(Config):
    degrees: float = Field(180.0, gt=0.0)
    minutes: int = 30
    dishes: tuple[str, ...] = Field((), strict=False)


class Broken(Config):
    degrees: float = Field(-1.0, gt=0.0)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"degreees": 1.0}, "Extra inputs are not permitted"),
        ({"degrees": "200"}, "valid number"),
        ({"degrees": 0.0}, "greater than 0"),
        ({"degrees": math.nan}, "finite number"),
        ({"degrees": math.inf}, "finite number"),
        ({"minutes": 1.0}, "valid integer"),
        ({"minutes": True}, "valid integer"),
        ({"dishes": "pie"}, "valid tuple"),
    ],
)
def test_what_does_not_fit_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Oven.model_validate(given)


def test_a_whole_number_is_a_number_and_a_list_may_fill_a_lenient_tuple() -> None:
    oven = Oven.model_validate({"degrees": 200, "dishes": ["pie", "bread"]})
    assert (oven.degrees, oven.dishes) == (200.0, ("pie", "bread"))


def test_a_configuration_cannot_be_changed() -> None:
    oven = Oven()
    with pytest.raises(ValidationError, match="frozen"):
        oven.minutes = 5  # type: ignore[misc]
    assert oven.minutes == 30


def test_a_default_that_breaks_its_own_rule_is_our_fault_and_seen_at_once() -> None:
    with pytest.raises(ValidationError, match="greater than 0"):
        Broken()


def test_equal_settings_are_equal_configurations() -> None:
    assert Oven(minutes=5) == Oven(minutes=5) != Oven(minutes=6)
    assert hash(Oven(minutes=5)) == hash(Oven(minutes=5))
