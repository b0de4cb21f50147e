"""Finding the first error token of a completion, so that what came before it can still be trained on.

Ours, not of a paper. A low-bit engine now and then draws a token it should not have, and the text falls into a
loop; the two signs together mark the token. Shape letters: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def first_error_token(tokens: Sequence[int], improbable: Sequence[bool], ngram: int, window: int) -> int | None:
    """Index of the first improbable token with an onset of repetition at most `window` tokens after it, or None.

    An onset of repetition is a position whose `ngram` tokens already occurred from some earlier position on, while
    the position before it is no such position. It may be the improbable token itself.
    """
    onsets = _repetition_onsets(tokens, ngram)
    for index, suspect in enumerate(improbable):
        if suspect and any(index <= onset <= index + window for onset in onsets):
            return index
    return None


def mask_before_errors(
    tokens_BT: Tensor, mask_BT: Tensor, logprobs_BT: Tensor, log_threshold: float, ngram: int, window: int
) -> Tensor:
    """The mask [B, T] cut off at each sequence's first error token, which is itself left out.

    A token is improbable when its `logprobs_BT` is below `log_threshold`. Only trained tokens are looked at, in
    their order; a sequence whose first trained token is the error keeps none.
    """
    kept_BT = mask_BT.clone()
    for row in range(len(mask_BT)):
        trained = mask_BT[row].nonzero()[:, 0]
        improbable = logprobs_BT[row, trained] < log_threshold
        if not bool(improbable.any()):
            continue
        error = first_error_token(tokens_BT[row, trained].tolist(), improbable.tolist(), ngram, window)
        if error is not None:
            kept_BT[row, trained[error] :] = False
    return kept_BT


def _repetition_onsets(tokens: Sequence[int], ngram: int) -> list[int]:
    seen: set[tuple[int, ...]] = set()
    onsets: list[int] = []
    repeated_before = False
    for start in range(len(tokens) - ngram + 1):
        window = tuple(tokens[start : start + ngram])
        repeated = window in seen
        if repeated and not repeated_before:
            onsets.append(start)
        seen.add(window)
        repeated_before = repeated
    return onsets
