"""Micro-batches small enough to work out by hand, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch

from qarl.records import LossInputs

Rows = Sequence[Sequence[float]]


def make_inputs(
    new: Rows,
    advantages: Sequence[float],
    old: Rows | None = None,
    engine: Rows | None = None,
    mask: Sequence[Sequence[bool]] | None = None,
    reference: Rows | None = None,
    entropy: Rows | None = None,
    tokens: Sequence[Sequence[int]] | None = None,
    max_new_tokens: int = 10,
) -> LossInputs:
    """A whole batch in one micro-batch; `old` is all 0 and `engine` equals `old` unless given."""
    new_BT = torch.tensor(new, dtype=torch.float64, requires_grad=True)
    old_BT = torch.zeros_like(new_BT).detach() if old is None else torch.tensor(old, dtype=torch.float64)
    mask_BT = torch.ones(new_BT.shape, dtype=torch.bool) if mask is None else torch.tensor(mask)
    return LossInputs(
        new_BT=new_BT,
        old_BT=old_BT,
        engine_BT=old_BT if engine is None else torch.tensor(engine, dtype=torch.float64),
        advantages_B=torch.tensor(advantages, dtype=torch.float64),
        mask_BT=mask_BT,
        num_sequences=len(new_BT),
        num_tokens=int(mask_BT.sum()),
        max_new_tokens=max_new_tokens,
        entropy_BT=None if entropy is None else torch.tensor(entropy, dtype=torch.float64),
        reference_BT=None if reference is None else torch.tensor(reference, dtype=torch.float64),
        tokens_BT=None if tokens is None else torch.tensor(tokens),
    )


def make_one_token(ratio: float, advantage: float, mismatch: float = 1.0) -> LossInputs:
    """One sequence of one token with the given `new / old` and `old / engine` probability ratios."""
    return make_inputs([[math.log(ratio)]], [advantage], engine=[[-math.log(mismatch)]], max_new_tokens=1)


@pytest.fixture
def inputs() -> Callable[..., LossInputs]:
    return make_inputs


@pytest.fixture
def one_token() -> Callable[..., LossInputs]:
    return make_one_token
