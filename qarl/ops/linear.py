"""Projections: the input's row-wise work (normalize, gate), its quantization and one GEMM, with their gradient.

The backward pass is straight-through: rounding counts as identity, so with y = x_q w_q^T,
dL/dx = dy @ dequant(w_q) and dL/dw = dy^T @ dequant(x_q) (arXiv 2604.07853; Bengio et al. 2013, arXiv 1308.3432).
Integer schemes fold the scales into dy, round it a row or a column, and multiply the codes themselves: with 16 bits,
three times faster than fp32 and with a relative error of about 1e-4 (docs/performance.md). Gradients of masters are
added where `masters.py` says by the operation itself.
Shape letters: T rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qarl.ops.gradient import gradient_of
from qarl.ops.kernels import kernels
from qarl.ops.masters import WHOLE, Masters
from qarl.ops.operand import Operand, Rows
from qarl.ops.reference import Rounding
from qarl.quant.formats import INT8


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMSNorm on the way into a projection."""

    gain: Tensor
    eps: float


class Projection:
    """Sibling linear layers that read the same input, multiplied as one GEMM with what was published.

    `linears` hold the master weights (on the meta device in an engine); `operand` is what is multiplied and
    is set whenever a new version is served. Integer schemes compute their backward pass on the codes too, the incoming
    gradient rounded as `rounding` says; in fp32 if that is None. `holder` is who holds the masters.
    """

    def __init__(self, names: Sequence[str], linears: Sequence[nn.Linear]) -> None:
        self.names = tuple(names)
        self.linears = tuple(linears)
        self.operand: Operand | None = None
        self.rounding: Rounding | None = Rounding()
        self.holder: Masters = WHOLE

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, K] to [T, N], plus `residual`."""
        return self._apply("plain", x, None, residual)

    def of_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """The projection of RMSNorm(x)."""
        return self._apply("norm", x, norm, None)

    def of_gated(self, gate_up: Tensor, residual: Tensor | None = None) -> Tensor:
        """The projection of silu(gate) * up; gate_up [T, 2K]."""
        return self._apply("gated", gate_up, None, residual)

    def masters(self) -> list[Tensor]:
        """Weights, then the biases that exist."""
        weights: list[Tensor] = [linear.weight for linear in self.linears]
        return weights + [linear.bias for linear in self.linears if linear.bias is not None]

    def _apply(self, prologue: str, x: Tensor, norm: Norm | None, residual: Tensor | None) -> Tensor:
        assert self.operand is not None, f"{self.names[0]}: no weights are served yet"
        if not torch.is_grad_enabled():
            return self.operand.product(prepare_rows(self.operand, prologue, x, norm), residual)
        gain, eps = (norm.gain, norm.eps) if norm is not None else (None, 0.0)
        call = _Call(self, self.operand, prologue, eps)
        return _Project.apply(call, x, gain, residual, *self.masters())  # type: ignore[no-any-return]

    def gated_backward(self, gate_up: Tensor, grad_TN: Tensor) -> Tensor:
        """Gradient of `of_gated` with respect to gate_up, without its product; the masters' are added up."""
        assert self.operand is not None
        rows = prepare_rows(self.operand, "gated", gate_up, None)
        return kernels().gated_backward(self.rows_backward(self.operand, rows, grad_TN), gate_up)

    def rows_backward(self, operand: Operand, rows: Rows, grad_TN: Tensor) -> Tensor:
        """Gradient of the product with respect to its rows [T, K]; the masters' are added up."""
        grad_TN = grad_TN.contiguous()
        grads = grad_TN.split([len(linear.weight) for linear in self.linears], 1)
        for linear, grad in zip(self.linears, grads, strict=True):
            if linear.bias is not None:
                gradient_of(linear.bias).add_(grad.sum(0))
        with self.holder.gradients(*(linear.weight for linear in self.linears)) as weights:
            return operand.backward(grad_TN, rows, weights, self.rounding)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    projection: Projection
    operand: Operand
    prologue: str
    eps: float


def prepare_rows(operand: Operand, prologue: str, x: Tensor, norm: Norm | None) -> Rows:
    """The GEMM's left side: the prologue's rows, quantized where the operand wants codes."""
    k, grid = kernels(), operand.rows_grid
    if grid is INT8:  # the fused kernels' grid
        if norm is not None:
            return k.rms_norm_quantize(x, norm.gain, norm.eps)
        return k.gated_quantize(x) if prologue == "gated" else k.quantize_rows(x)
    if norm is not None:
        x = k.rms_norm(x, norm.gain, norm.eps)
    elif prologue == "gated":
        x = k.gated(x)
    return (x, None) if grid is None else k.quantize_rows(x, grid)


class _Project(torch.autograd.Function):
    """Saves the prologue's input and, for quantized activations, their codes (a quarter of the bytes)."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, x: Tensor, gain: Tensor | None, residual: Tensor | None, *masters: Tensor
    ) -> Tensor:
        norm = Norm(gain, call.eps) if gain is not None else None
        rows = prepare_rows(call.operand, call.prologue, x, norm)
        keep_rows = call.operand.quantizes_rows
        ctx.call = call
        ctx.has_residual = residual is not None
        ctx.save_for_backward(
            x if call.prologue != "plain" or not keep_rows else None, gain, *rows if keep_rows else ()
        )
        return call.operand.product(rows, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        x, gain, *saved = ctx.saved_tensors
        norm = Norm(gain, call.eps) if gain is not None else None
        rows = (saved[0], saved[1]) if saved else prepare_rows(call.operand, call.prologue, x, norm)
        grad_x, grad_gain = call.projection.rows_backward(call.operand, rows, grad_TN), None
        if norm is not None:
            grad_x, grad_gain = kernels().rms_norm_backward(grad_x, x, norm.gain, norm.eps)
        elif call.prologue == "gated":
            grad_x = kernels().gated_backward(grad_x, x)
        return None, grad_x, grad_gain, grad_TN if ctx.has_residual else None, *[None] * len(call.projection.masters())
