"""Where an answer went wrong."""

from __future__ import annotations

import pytest
import torch

from qarl.objectives.salvage import first_error_token, mask_before_errors

LOOP = [1, 2, 3, 9, 5, 6, 5, 6, 5, 6]
"""The pair (5, 6) occurs again from index 6 on."""


def improbable(*indices: int, length: int = len(LOOP)) -> list[bool]:
    return [index in indices for index in range(length)]


@pytest.mark.parametrize(
    ("suspects", "window", "expected"),
    [
        ((3,), 3, 3),  # the repetition sets in three tokens later
        ((3,), 2, None),  # too far away
        ((6,), 0, 6),  # the error token begins the repetition itself
        ((1, 3), 4, 3),  # 1 is too far from the onset
        ((7, 8), 3, None),  # inside the loop, after its onset
        ((), 16, None),
    ],
)
def test_the_error_token_is_improbable_and_shortly_before_a_repetition(suspects, window, expected):
    assert first_error_token(LOOP, improbable(*suspects), ngram=2, window=window) == expected


def test_an_improbable_token_without_repetition_is_no_error():
    assert first_error_token([1, 2, 3, 4, 5], improbable(2, length=5), ngram=2, window=16) is None


def test_a_repetition_shorter_than_the_ngram_is_none():
    assert first_error_token([7, 1, 2, 3, 1, 2, 4], improbable(0, length=7), ngram=3, window=16) is None


def test_the_same_token_over_and_over_is_a_repetition():
    assert first_error_token([1, 2, 8, 8, 8, 8, 8], improbable(2, length=7), ngram=4, window=1) == 2


def test_the_mask_ends_before_the_error_and_only_trained_tokens_are_looked_at():
    # The untrained token in the middle would break the loop if it counted.
    tokens = torch.tensor([[9, 5, 6, 77, 5, 6], [1, 2, 3, 4, 5, 6], [9, 5, 5, 5, 5, 5]])
    mask = torch.tensor([[True, True, True, False, True, True], [True] * 6, [False] * 6])
    logprobs = torch.full((3, 6), -0.1)
    logprobs[:, 1] = -9.0
    kept = mask_before_errors(tokens, mask, logprobs, log_threshold=-5.0, ngram=2, window=4)
    assert kept.tolist() == [[True, False, False, False, False, False], [True] * 6, [False] * 6]
    assert mask[0].sum() == 5, "the given mask is left as it was"
