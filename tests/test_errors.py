"""The nearest word, where there is one."""

from qarl.errors import suggestion


def test_near_words_are_suggested_nearest_first_and_others_are_not() -> None:
    assert suggestion("promt", ["prompt", "answer"]) == "; did you mean 'prompt'?"
    assert suggestion("sum", ["rum", "none", "sums"]) == "; did you mean 'sums' or 'rum'?"
    assert suggestion("xyz", ["prompt"]) == ""
