"""The nearest word, where there is one."""

from qarl.errors import suggestion


def test_near_words_are_suggested_nearest_first_and_others_are_not() -> None:
    assert suggestion("promt", ["prompt", "answer"]) == "; did you mean 'prompt'?"
    assert suggestion("w8a8", ["w4a8-int8", "none", "w8a8-int8"]) == "; did you mean 'w8a8-int8' or 'w4a8-int8'?"
    assert suggestion("xyz", ["prompt"]) == ""
