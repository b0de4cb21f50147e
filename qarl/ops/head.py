"""From hidden states to the log-probabilities of given tokens, a chunk of rows at a time.

The full [tokens, vocabulary] matrix never exists: the forward pass keeps two numbers a row; with them the backward pass
computes logits again, a block of the vocabulary at a time, and so expands and updates each weight once.
Shape letters: T rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qarl.ops.kernels import kernels
from qarl.ops.linear import Norm, prepare_rows
from qarl.ops.masters import WHOLE, Masters
from qarl.ops.operand import COLUMNS, Operand, Rows
from qarl.ops.reference import Scores

LARGEST_BLOCK = 4096
"""Most tokens of the vocabulary that the backward pass treats at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The output projection with the final norm in front of it.

    `weight` is the master, which gets its gradient unless it is frozen; it may have more rows than the operand, which
    is then its first rows. `values` are those of the master, where they are in memory here; `holder` is who holds it.
    """

    operand: Operand
    norm: Norm
    weight: Tensor
    values: Tensor | None = None
    holder: Masters = WHOLE


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
    call = _Call(head, 1.0 / temperature, chunk, entropy_gradient)
    return _TokenLogprobs.apply(call, hidden_TD, targets_T, head.norm.gain, head.weight)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    head: Head
    inverse_temperature: float
    chunk: int
    entropy_gradient: bool


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _Call, hidden: Tensor, targets: Tensor, gain: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        operand, norm = call.head.operand, Norm(gain, call.head.norm.eps)
        found = Scores(*(hidden.new_empty(len(hidden)) for _ in range(4)))
        for first in range(0, len(hidden), call.chunk):
            at = slice(first, first + call.chunk)
            chunk_logits = operand.product(prepare_rows(operand, "norm", hidden[at], norm), None)
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
        head = call.head
        hidden, targets, gain, *saved = ctx.saved_tensors
        rows = prepare_rows(head.operand, "norm", hidden, Norm(gain, head.norm.eps))
        of_entropy = grad_entropy_T.contiguous() if call.entropy_gradient else None
        frozen: AbstractContextManager[Sequence[Tensor | None]] = nullcontext([None])
        with head.holder.gradients(head.weight) if head.weight.requires_grad else frozen as (grad_weight,):
            scores, grad_T = Scores(*saved), grad_T.contiguous()
            grad_rows = _add_gradients(call, rows, targets, scores, grad_T, of_entropy, grad_weight)
        grad_hidden, grad_gain = kernels().rms_norm_backward(grad_rows, hidden, gain, head.norm.eps)
        return None, grad_hidden, None, grad_gain, None


def _add_gradients(
    call: _Call,
    rows: Rows,
    targets_T: Tensor,
    scores: Scores,
    grad_T: Tensor,
    of_entropy_T: Tensor | None,
    grad_weight_VD: Tensor | None,
) -> Tensor:
    """Gradient of the product's rows [T, D]; that of the weight is added to `grad_weight_VD`, unless it is frozen."""
    whole, values = call.head.operand, call.head.values
    rows_TD = whole.rows_as_float(rows)
    grad_rows_TD = torch.zeros_like(rows_TD)
    width = vocabulary_block(len(rows_TD), whole.height, call.chunk)
    for first in range(0, whole.height, width):
        some = range(first, min(first + width, whole.height))
        operand = whole.outputs(some)
        grads = operand.product(rows, None)
        kernels().logits_gradient_(grads, targets_T - first, scores, grad_T, of_entropy_T, call.inverse_temperature)
        grad_rows_TD.addmm_(grads, operand.dense(None if values is None else values[first:]))
        if grad_weight_VD is not None:
            grad_weight_VD[first : some.stop].addmm_(grads.t(), rows_TD)
    return grad_rows_TD


def vocabulary_block(rows: int, vocabulary: int, chunk: int) -> int:
    """How many columns of logits the backward pass makes at a time, a multiple of COLUMNS.

    So many that with all rows they are no more numbers than `chunk` rows have, and no more than stay in a cache.
    """
    fitting = min(chunk * vocabulary // max(rows, 1), LARGEST_BLOCK)
    return max(fitting // COLUMNS * COLUMNS, COLUMNS)
