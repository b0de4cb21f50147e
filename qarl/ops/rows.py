"""Gradients of the row-wise operations, in torch. Shape letters: T rows, D width, F feed-forward."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_backward(grad_TD: Tensor, x_TD: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Gradients of RMSNorm with respect to x (shape of x) and gain [D]; leading axes of x are rows."""
    inverse = torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps)
    unit = x_TD * inverse
    grad_gain = (grad_TD * unit).flatten(0, -2).sum(0)
    grad_unit = grad_TD * gain_D
    grad_x = (grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True)) * inverse
    return grad_x, grad_gain


def gated_backward(grad_TF: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient of silu(gate) * up with respect to gate_up [T, 2F], gate first."""
    gate, up = gate_up.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_gate = grad_TF * up * (sigmoid + silu * (1 - sigmoid))
    return torch.cat([grad_gate, grad_TF * silu], -1)
