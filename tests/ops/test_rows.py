"""Gradients of the row-wise operations against float64 autograd of their formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qarl.ops.rows import gated_backward, rms_norm_backward

EPS = 1e-3
"""Large enough that leaving it out would show."""


def wide(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double().requires_grad_(True) for tensor in tensors]


@pytest.mark.parametrize("leading", [(5,), (5, 3)])
def test_rms_norm_backward_is_autograds(leading):
    x, gain, grad = torch.randn(*leading, 17) * 0.1, torch.randn(17), torch.randn(*leading, 17)
    wide_x, wide_gain = wide(x, gain)
    y = wide_x / (wide_x.square().mean(-1, keepdim=True) + EPS).sqrt() * wide_gain
    expected = torch.autograd.grad(y, (wide_x, wide_gain), grad.double())
    for found, exact in zip(rms_norm_backward(grad, x, gain, EPS), expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


def test_gated_backward_is_autograds():
    gate_up, grad = torch.randn(6, 22) * 4, torch.randn(6, 11)
    (wide_gate_up,) = wide(gate_up)
    gate, up = wide_gate_up.chunk(2, -1)
    (expected,) = torch.autograd.grad(F.silu(gate) * up, wide_gate_up, grad.double())
    torch.testing.assert_close(gated_backward(grad, gate_up).double(), expected, rtol=1e-5, atol=1e-6)


def test_gates_of_any_size_have_finite_gradients():
    gate_up = torch.tensor([[-300.0, 300.0, 0.0, 2.0, 2.0, 2.0]])
    grad = gated_backward(torch.ones(1, 3), gate_up)
    # silu' is 0, 1 and 1/2 there; silu itself 0, 300 and 0.
    torch.testing.assert_close(grad, torch.tensor([[0.0, 2.0, 1.0, 0.0, 300.0, 0.0]]))
