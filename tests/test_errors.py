"""The nearest word, where there is one; and one line, whatever a key holds."""

from qarl.errors import printable, suggestion


def test_near_words_are_suggested_nearest_first_and_others_are_not() -> None:
    assert suggestion("promt", ["prompt", "answer"]) == "; did you mean 'prompt'?"
    assert suggestion("sum", ["rum", "none", "sums"]) == "; did you mean 'sums' or 'rum'?"
    assert suggestion("xyz", ["prompt"]) == ""


def test_signs_that_would_break_a_line_are_escaped_and_others_left() -> None:
    assert printable("a\nb\u2028c\x00 ßπ\U0001f600 'quoted'") == "a\\nb\\u2028c\\x00 ßπ\U0001f600 'quoted'"
