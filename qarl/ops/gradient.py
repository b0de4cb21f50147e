"""Where gradients of master weights go: operations add to `.grad` themselves.

Autograd would make a tensor of each contribution first and then add it: a pass over memory more, and for a tied
embedding two tensors of the vocabulary's size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gradient_of(master: Tensor) -> Tensor:
    """The gradient that a master has collected so far, zeros at first: a backward pass adds its share in place."""
    assert master.requires_grad, "a frozen master takes no gradient"
    if master.grad is None:
        master.grad = torch.zeros_like(master)
    return master.grad
