"""The page of field cases names tests that exist."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "field-cases.md"
NAMED = sorted(set(re.findall(r"`([\w/]+\.py(?:::\w+)?)`", PAGE.read_text())))


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 50


@pytest.mark.parametrize("name", NAMED)
def test_a_test_that_the_page_names_exists(name: str) -> None:
    file, _, function = name.partition("::")
    assert (TESTS / file).is_file()
    assert not function or f"def {function}(" in (TESTS / file).read_text()
