"""From hidden states to the log-probabilities of given tokens, a chunk of rows at a time.

The full [tokens, vocabulary] matrix never exists: the forward pass keeps two numbers a row; with them the backward pass
computes logits again, a block of the vocabulary at a time, and so expands and updates each weight once.
Shape letters: T rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qarl.ops.gradient import gradient_of
from qarl.ops.kernels import kernels
from qarl.ops.linear import Norm, prepare_rows
from qarl.ops.operand import COLUMNS, Operand
from qarl.ops.reference import Scores

LARGEST_BLOCK = 4096
"""Most tokens of the vocabulary that the backward pass treats at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The output projection with the final norm in front of it.

    `weight` is the master, which gets its gradient unless it is frozen; it may have more rows than the operand, which
    is then its first rows.
    """

    operand: Operand
    norm: Norm
    weight: Tensor


def logits(head: Head, hidden_TD: Tensor) -> Tensor:
    """[T, V] of a few rows, without gradient."""
    with torch.no_grad():
        return head.operand.product(prepare_rows(head.operand, "norm", hidden_TD, head.norm), None)


def token_logprobs(
    head: Head, hidden_TD: Tensor, targets_T: Tensor, temperature: float, chunk: int, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target under softmax(logits / temperature) [T], and the entropies [T].

    Entropies carry a gradient only if asked, since it costs a pass over the logits. No more numbers of logits exist at
    a time than `chunk` rows have. The engine's sampling uses the same sums in the same order, so equal hidden states
    give equal bits.
    """
    call = _Call(head.operand, head.weight, head.norm.eps, 1.0 / temperature, chunk, entropy_gradient)
    return _TokenLogprobs.apply(call, hidden_TD, targets_T, head.norm.gain, head.weight)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    operand: Operand
    weight: Tensor
    eps: float
    inverse_temperature: float
    chunk: int
    entropy_gradient: bool


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, hidden: Tensor, targets: Tensor, gain: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        norm = Norm(gain, call.eps)
        found = Scores(*(hidden.new_empty(len(hidden)) for _ in range(4)))
        for first in range(0, len(hidden), call.chunk):
            at = slice(first, first + call.chunk)
            chunk_logits = call.operand.product(prepare_rows(call.operand, "norm", hidden[at], norm), None)
            scores = kernels().token_logprobs(chunk_logits, targets[at], call.inverse_temperature)
            for whole, part in zip(found, scores, strict=True):
                whole[at] = part
        if not call.entropy_gradient:
            ctx.mark_non_differentiable(found.entropies)
        ctx.call = call
        ctx.save_for_backward(hidden, targets, gain, *found)
        return found.logprobs, found.entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        hidden, targets, gain, *saved = ctx.saved_tensors
        scores = Scores(*saved)
        rows = prepare_rows(call.operand, "norm", hidden, Norm(gain, call.eps))
        rows_TD = call.operand.rows_as_float(rows)
        grad_weight = gradient_of(call.weight) if call.weight.requires_grad else None
        grad_rows = torch.zeros_like(hidden)
        grad_T, of_entropy = grad_T.contiguous(), grad_entropy_T.contiguous() if call.entropy_gradient else None
        served = call.operand.height
        width = vocabulary_block(len(hidden), served, call.chunk)
        for first in range(0, served, width):
            some = range(first, min(first + width, served))
            operand = call.operand.outputs(some)
            grads = operand.product(rows, None)
            kernels().logits_gradient_(grads, targets - first, scores, grad_T, of_entropy, call.inverse_temperature)
            grad_rows.addmm_(grads, operand.dense(call.weight[first:]))
            if grad_weight is not None:
                grad_weight[first : some.stop].addmm_(grads.t(), rows_TD)
        grad_hidden, grad_gain = kernels().rms_norm_backward(grad_rows, hidden, gain, call.eps)
        return None, grad_hidden, None, grad_gain, None


def vocabulary_block(rows: int, vocabulary: int, chunk: int) -> int:
    """How many columns of logits the backward pass makes at a time, a multiple of COLUMNS.

    So many that with all rows they are no more numbers than `chunk` rows have, and no more than stay in a cache.
    """
    fitting = min(chunk * vocabulary // max(rows, 1), LARGEST_BLOCK)
    return max(fitting // COLUMNS * COLUMNS, COLUMNS)
