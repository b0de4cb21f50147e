"""Where gradients of masters are collected."""

from __future__ import annotations

import pytest
import torch

from qarl.ops.gradient import gradient_of


def test_a_gradient_starts_at_zero_and_is_added_to_in_place():
    master = torch.randn(3, 2, requires_grad=True)
    first = gradient_of(master)
    assert torch.equal(first, torch.zeros(3, 2))
    first.add_(1.0)
    assert gradient_of(master) is master.grad
    assert torch.equal(gradient_of(master), torch.ones(3, 2))


def test_a_frozen_master_takes_no_gradient() -> None:
    with pytest.raises(AssertionError, match="frozen"):
        gradient_of(torch.zeros(2))
