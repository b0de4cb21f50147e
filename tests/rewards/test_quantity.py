from __future__ import annotations

import time
from fractions import Fraction

import pytest

from qarl.rewards.quantity import Quantity, numbers_in, plain, quantity, same_quantity


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("7", "7", ""),
        (" +7. ", "7", ""),
        ("-5", "-5", ""),
        ("\u22125", "-5", ""),
        ("007", "7", ""),
        (".5", "1/2", ""),
        ("1,234,567.5", "2469135/2", ""),
        ("1{,}000", "1000", ""),
        ("-$3.20", "-16/5", ""),
        ("$-3", "-3", ""),
        ("$7$", "7", ""),
        ("(7)", "7", ""),
        ("**7**", "7", ""),
        ("3/4", "3/4", ""),
        ("-3/4", "-3/4", ""),
        ("1 1/2", "3/2", ""),
        (r"-\frac{1}{2}", "-1/2", ""),
        (r"1\dfrac{1}{2}", "3/2", ""),
        (r"\frac12", "1/2", ""),
        ("1e5", "100000", ""),
        ("2.5e-1", "1/4", ""),
        (r"3 \times 10^{5}", "300000", ""),
        ("5 million", "5000000", ""),
        ("2 dozen eggs", "24", "egg"),
        ("42 apples", "42", "apple"),
        ("42 apple", "42", "apple"),
        (r"7\text{ cm}^2", "7", "cm2"),
        (r"7 \text{ cm}", "7", "cm"),
        ("9 m^2", "9", "m2"),
        ("60 km/h", "60", "km/h"),
        ("90°", "90", "°"),
    ],
)
def test_one_number_is_read(text, value, unit):
    assert quantity(text) == Quantity(Fraction(value), unit)


@pytest.mark.parametrize(
    "text",
    ["", "seven", "7 or 8", "7 and a half", "7, 8", "3 + 4", "2x", "2pi", r"2\pi", "5/0", "--5", "-$-5", "1,2,3",
     "12,34", "9" * 101, "1e301", "1e99999", "x7", "7=7"],
)  # fmt: skip
def test_anything_else_is_no_number(text):
    assert quantity(text) is None


@pytest.mark.parametrize("text", ["50%", "50 %", r"50\%", "50 percent", "50 per cent"])
def test_percentages_are_marked(text):
    assert quantity(text) == Quantity(Fraction(50), percent=True)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3 + 4 = 7.", ["3", "4", "7"]),
        ("10-5", ["10", "5"]),
        ("10 - -5", ["10", "-5"]),
        ("5\u201310", ["5", "10"]),
        ("costs $1,234.50, not $5", ["$1,234.50", "$5"]),
        ("a half is 1/2.", ["1/2"]),
        ("so...7", ["7"]),
        ("from .5 to 50%", [".5", "50%"]),
        ("version 1.2.3", ["1.2"]),
        ("5 million or 6 millionaires", ["5 million", "6"]),
        (r"\frac{3}{4}", ["3/4"]),
        ("none", []),
    ],
)
def test_numbers_in_a_text_are_found_with_their_signs(text, numbers):
    assert numbers_in(text) == numbers


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("50%", "50%", True),
        ("0.5%", "50%", False),
        ("50%", "5", False),
        ("5 km", "5", True),
        ("5 km", "5 m", False),
        ("5 miles", "5 mile", True),
        ("6/8", "0.75", True),
        ("0.33", "1/3", False),
    ],
)
def test_equality_of_quantities(one, other, same):
    left, right = quantity(one), quantity(other)
    assert left is not None
    assert right is not None
    assert same_quantity(left, right) is same
    assert same_quantity(right, left) is same


def test_tolerance_is_a_share_of_the_larger():
    third, near = Quantity(Fraction(1, 3)), Quantity(Fraction(33, 100))
    assert not same_quantity(third, near, tolerance=0.0099)
    assert same_quantity(third, near, tolerance=0.0101)


def test_fraction_of_expressions_is_left_alone():
    assert plain(r"\frac{a+b}{2}") == r"\frac{a+b}{2}"


@pytest.mark.parametrize(
    "text", ["9" * 100_000, "9 " * 50_000, "1/" * 50_000, "-" * 100_000, "1," * 50_000, "1e" * 50_000]
)
def test_hostile_texts_take_no_time(text):
    start = time.perf_counter()
    numbers_in(text)
    quantity(text)
    assert time.perf_counter() - start < 5.0
