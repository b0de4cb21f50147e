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
from qarl.ops.rows import rms_norm_backward


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The output projection with the final norm in front of it; `weight` is the master, with gradient."""

    operand: Operand
    norm: Norm
    weight: Tensor


def logits(head: Head, hidden_TD: Tensor) -> Tensor:
    """[T, V] of a few rows, without gradient."""
    with torch.no_grad():
        return head.operand.product(prepare_rows(head.operand, "norm", hidden_TD, head.norm), None)


def token_logprobs(
    head: Head, hidden_TD: Tensor, targets_T: Tensor, temperature: float, chunk: int, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target under softmax(logits / temperature) [T], and the entropies [T] if asked.

    `chunk` bounds how many rows of logits exist at a time. The engine's sampling uses the same sums in the same
    order, so equal hidden states give equal bits.
    """
    call = _Call(head.operand, head.norm.eps, 1.0 / temperature, chunk, with_entropy)
    logprobs, entropy = _TokenLogprobs.apply(call, hidden_TD, targets_T, head.norm.gain, head.weight)
    return logprobs, entropy if with_entropy else None


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    operand: Operand
    eps: float
    inverse_temperature: float
    chunk: int
    with_entropy: bool


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
            found = kernels().token_logprobs(chunk_logits, targets[at], call.inverse_temperature)
            logprobs[at], shifts[at], sums[at] = found
            if call.with_entropy:
                scaled = (chunk_logits - shifts[at, None]) * call.inverse_temperature
                entropy[at] = sums[at].log() - (scaled.exp() * scaled).sum(-1) / sums[at]
        ctx.call = call
        ctx.save_for_backward(hidden, targets, gain, shifts, sums, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        hidden, targets, gain, shifts, sums, entropy = ctx.saved_tensors
        norm = Norm(gain, call.eps)
        dense_VD = call.operand.dense()
        grad_weight, grad_normed = torch.zeros_like(dense_VD), torch.empty_like(hidden)
        for first in range(0, len(hidden), call.chunk):
            at = slice(first, first + call.chunk)
            rows = prepare_rows(call.operand, "norm", hidden[at], norm)
            grad_logits = call.operand.product(rows, None)
            kernels().softmax_(grad_logits, shifts[at], sums[at], call.inverse_temperature)
            grad_logits = _grad_logits(grad_logits, targets[at], grad_T[at], grad_entropy_T[at], entropy[at], call)
            torch.mm(grad_logits, dense_VD, out=grad_normed[at])
            grad_weight.addmm_(grad_logits.t(), call.operand.rows_as_float(rows))
        grad_hidden, grad_gain = rms_norm_backward(grad_normed, hidden, gain, call.eps)
        return None, grad_hidden, None, grad_gain, grad_weight


def _grad_logits(
    probabilities: Tensor, targets: Tensor, grad: Tensor, grad_entropy: Tensor, entropy: Tensor, call: _Call
) -> Tensor:
    """d(loss)/d(logits) of a chunk, made in place of its softmax p.

    d logprob / d logit = (onehot - p) / temperature; d H / d logit = -p (log p + H) / temperature.
    """
    towards = -grad[:, None]
    if call.with_entropy:
        log_p = probabilities.clamp_min(torch.finfo(torch.float32).tiny).log()
        towards = towards - grad_entropy[:, None] * (log_p + entropy[:, None])
    grads = probabilities.mul_(towards)
    grads[torch.arange(len(targets)), targets] += grad
    return grads.mul_(call.inverse_temperature)
