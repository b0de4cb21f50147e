"""From hidden states to the log-probabilities of given tokens, a chunk of rows at a time.

The full [tokens, vocabulary] matrix never exists: the forward pass keeps two numbers a row, the backward pass
computes each chunk's logits again. Shape letters: T rows, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qarl.ops.kernels import kernels
from qarl.ops.linear import Norm, prepare_rows
from qarl.ops.operand import Operand


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The output projection with the final norm in front of it.

    `weight` is the master, with gradient; it may have more rows than the operand, which is then its first rows.
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

    Entropies carry a gradient only if asked, since it costs a pass over the logits. `chunk` bounds how many rows of
    logits exist at a time. The engine's sampling uses the same sums in the same order, so equal hidden states give
    equal bits.
    """
    call = _Call(head.operand, head.norm.eps, 1.0 / temperature, chunk, entropy_gradient)
    return _TokenLogprobs.apply(call, hidden_TD, targets_T, head.norm.gain, head.weight)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    operand: Operand
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
        logprobs, shifts, sums, entropy = (hidden.new_zeros(len(hidden)) for _ in range(4))
        for first in range(0, len(hidden), call.chunk):
            at = slice(first, first + call.chunk)
            chunk_logits = call.operand.product(prepare_rows(call.operand, "norm", hidden[at], norm), None)
            scores = kernels().token_logprobs(chunk_logits, targets[at], call.inverse_temperature)
            logprobs[at], shifts[at], sums[at], entropy[at] = (
                scores.logprobs,
                scores.shifts,
                scores.sums,
                scores.entropies,
            )
        if not call.entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        ctx.call = call
        ctx.save_for_backward(hidden, targets, gain, weight, shifts, sums, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        hidden, targets, gain, weight, shifts, sums, entropy = ctx.saved_tensors
        norm = Norm(gain, call.eps)
        dense_VD = call.operand.dense(weight)
        grad_weight, grad_normed = torch.zeros_like(weight), torch.empty_like(hidden)
        for first in range(0, len(hidden), call.chunk):
            at = slice(first, first + call.chunk)
            rows = prepare_rows(call.operand, "norm", hidden[at], norm)
            grad_logits = call.operand.product(rows, None)
            kernels().softmax_(grad_logits, shifts[at], sums[at], call.inverse_temperature)
            grad_logits = _grad_logits(grad_logits, targets[at], grad_T[at], grad_entropy_T[at], entropy[at], call)
            torch.mm(grad_logits, dense_VD, out=grad_normed[at])
            grad_weight[: len(dense_VD)].addmm_(grad_logits.t(), call.operand.rows_as_float(rows))
        grad_hidden, grad_gain = kernels().rms_norm_backward(grad_normed, hidden, gain, call.eps)
        return None, grad_hidden, None, grad_gain, grad_weight


def _grad_logits(
    probabilities: Tensor, targets: Tensor, grad: Tensor, grad_entropy: Tensor, entropy: Tensor, call: _Call
) -> Tensor:
    """d(loss)/d(logits) of a chunk, made in place of its softmax p.

    d logprob / d logit = (onehot - p) / temperature; d H / d logit = -p (log p + H) / temperature.
    """
    towards = -grad[:, None]
    if call.entropy_gradient:
        log_p = probabilities.clamp_min(torch.finfo(torch.float32).tiny).log()
        towards = towards - grad_entropy[:, None] * (log_p + entropy[:, None])
    grads = probabilities.mul_(towards)
    grads[torch.arange(len(targets)), targets] += grad
    return grads.mul_(call.inverse_temperature)
