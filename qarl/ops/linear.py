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

from qarl.ops.adapter import Adapter, LowRank
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
    gradient rounded as `rounding` says; in fp32 if that is None. `adapter`, where there is one, is served beside the
    operand, and `low_rank` are its masters, one for each linear layer that has one. `holder` is who holds the others.
    """

    def __init__(self, names: Sequence[str], linears: Sequence[nn.Linear]) -> None:
        self.names = tuple(names)
        self.linears = tuple(linears)
        self.operand: Operand | None = None
        self.rounding: Rounding | None = Rounding()
        self.adapter: Adapter | None = None
        self.low_rank: tuple[LowRank | None, ...] = (None,) * len(self.linears)
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

    def trained(self) -> list[Tensor]:
        """What takes a gradient of the masters and the adapters'."""
        low_rank = [tensor for part in self.low_rank if part is not None for tensor in (part.a, part.b)]
        return [tensor for tensor in (*self.masters(), *low_rank) if tensor.requires_grad]

    @property
    def trains_masters(self) -> bool:
        """Whether the linear layers themselves are trained; they are frozen together."""
        return self.linears[0].weight.requires_grad

    def _apply(self, prologue: str, x: Tensor, norm: Norm | None, residual: Tensor | None) -> Tensor:
        call = self._call(prologue, 0.0 if norm is None else norm.eps)
        if not torch.is_grad_enabled():
            return call.product(x, norm, residual)[0]
        gain = None if norm is None else norm.gain
        return _Project.apply(call, x, gain, residual, *self.trained())  # type: ignore[no-any-return]

    def _call(self, prologue: str, eps: float) -> _Call:
        assert self.operand is not None, f"{self.names[0]}: no weights are served yet"
        return _Call(self, self.operand, self.adapter, prologue, eps)

    def gated_backward(self, gate_up: Tensor, grad_TN: Tensor) -> Tensor:
        """Gradient of `of_gated` with respect to gate_up, without its product; the masters' are added up."""
        grad_rows = self._call("gated", 0.0).rows_backward(gate_up, None, None, grad_TN)
        return kernels().gated_backward(grad_rows, gate_up)

    def add_gradients(self, operand: Operand, rows: Rows, grad_TN: Tensor) -> None:
        """Add up the gradients of weights and biases."""
        grads = grad_TN.split([len(linear.weight) for linear in self.linears], 1)
        for linear, grad in zip(self.linears, grads, strict=True):
            if linear.bias is not None:
                gradient_of(linear.bias).add_(grad.sum(0))
        with self.holder.gradients(*(linear.weight for linear in self.linears)) as weights:
            operand.add_grad_weight(grad_TN, rows, weights, self.rounding)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    projection: Projection
    operand: Operand
    adapter: Adapter | None
    prologue: str
    eps: float

    def product(self, x: Tensor, norm: Norm | None, residual: Tensor | None) -> tuple[Tensor, Rows]:
        """What the projection makes of x [T, N], and the rows that the operand multiplied."""
        if self.adapter is None:
            rows = prepare_rows(self.operand, self.prologue, x, norm)
            return self.operand.product(rows, residual), rows
        x_TK = float_rows(self.prologue, x, norm)
        rows = quantized_rows(self.operand, x_TK)
        return self.adapter.add_to_(self.operand.product(rows, residual), x_TK), rows

    def rows_backward(self, x: Tensor | None, norm: Norm | None, rows: Rows | None, grad_TN: Tensor) -> Tensor:
        """Gradient of the product with respect to its rows [T, K]; what is trained gets its own added to `.grad`.

        `x` may be missing where `rows` are given, and the other way round.
        """
        grad_TN, projection = grad_TN.contiguous(), self.projection
        if projection.trains_masters:
            rows = rows or prepare_rows(self.operand, self.prologue, present(x), norm)
            projection.add_gradients(self.operand, rows, grad_TN)
        grad_rows = self.operand.grad_rows(grad_TN, projection.rounding)
        if self.adapter is not None:
            x_TK = float_rows(self.prologue, present(x), norm)
            grad_rows += self.adapter.backward(grad_TN, x_TK, projection.low_rank)
        return grad_rows


def present(x: Tensor | None) -> Tensor:
    """What the forward pass kept."""
    assert x is not None, "not kept for the backward pass"
    return x


def prepare_rows(operand: Operand, prologue: str, x: Tensor, norm: Norm | None) -> Rows:
    """The GEMM's left side: the prologue's rows, quantized where the operand wants codes."""
    k = kernels()
    if operand.rows_grid is INT8:  # the fused kernels' grid
        if norm is not None:
            return k.rms_norm_quantize(x, norm.gain, norm.eps)
        return k.gated_quantize(x) if prologue == "gated" else k.quantize_rows(x)
    return quantized_rows(operand, float_rows(prologue, x, norm))


def float_rows(prologue: str, x: Tensor, norm: Norm | None) -> Tensor:
    """What the prologue makes of x, [T, K] in full precision."""
    if norm is not None:
        return kernels().rms_norm(x, norm.gain, norm.eps)
    return kernels().gated(x) if prologue == "gated" else x


def quantized_rows(operand: Operand, x_TK: Tensor) -> Rows:
    """Codes where the operand wants them; the same as the fused kernels'."""
    return (x_TK, None) if operand.rows_grid is None else kernels().quantize_rows(x_TK, operand.rows_grid)


class _Project(torch.autograd.Function):
    """Saves the prologue's input where the backward pass reads it and, for the gradient of masters, quantized rows as
    codes (a quarter of the bytes).
    """

    @staticmethod
    def forward(
        ctx: Any, call: _Call, x: Tensor, gain: Tensor | None, residual: Tensor | None, *trained: Tensor
    ) -> Tensor:
        y, rows = call.product(x, Norm(gain, call.eps) if gain is not None else None, residual)
        trains = call.projection.trains_masters
        keeps_rows = trains and call.operand.quantizes_rows
        reads_x = call.prologue != "plain" or call.adapter is not None or (trains and not keeps_rows)
        ctx.call = call
        ctx.has_residual = residual is not None
        ctx.num_trained = len(trained)
        ctx.save_for_backward(x if reads_x else None, gain, *rows if keeps_rows else ())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        x, gain, *saved = ctx.saved_tensors
        norm = Norm(gain, call.eps) if gain is not None else None
        rows = (saved[0], saved[1]) if saved else None
        grad_x, grad_gain = call.rows_backward(x, norm, rows, grad_TN), None
        if norm is not None:
            grad_x, grad_gain = kernels().rms_norm_backward(grad_x, x, norm.gain, norm.eps)
        elif call.prologue == "gated":
            grad_x = kernels().gated_backward(grad_x, x)
        return None, grad_x, grad_gain, grad_TN if ctx.has_residual else None, *[None] * ctx.num_trained
