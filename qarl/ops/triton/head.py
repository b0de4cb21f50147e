"""The end of the model: log-probabilities, entropies and sampling from rows of logits. One program is one row.

Sums are over blocks of fixed size in order, in fp64.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK, PIECE = 1024, 32
"""Logits of a step along the row, and of the smallest group in which a drawn token is looked for."""

LOWEST = tl.constexpr(-200.0)
"""Where exp is 0 already."""


@triton.jit
def row_peak(logits_ptr, n, BLOCK: tl.constexpr):
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        best = tl.maximum(best, tl.load(logits_ptr + i, mask=i < n, other=float("-inf")))
    return tl.max(best, 0)


@triton.jit
def exponents(logits_ptr, i, n, peak, inverse_temperature):
    """z = (logit - peak) / temperature of the logits `i`, and exp(z), 0 past the end."""
    logits = tl.load(logits_ptr + i, mask=i < n, other=float("-inf"))
    z = (logits - peak) * inverse_temperature
    z = tl.where(z < LOWEST, LOWEST, z)
    return z, tl.where(i < n, tl.exp(z), 0.0)


@triton.jit
def exp_sums(logits_ptr, n, peak, inverse_temperature, BLOCK: tl.constexpr):
    """Sums of exp(z) and of exp(z) z, fp64."""
    total = tl.zeros((), tl.float64)
    weighted = tl.zeros((), tl.float64)
    for first in range(0, n, BLOCK):
        z, e = exponents(logits_ptr, first + tl.arange(0, BLOCK), n, peak, inverse_temperature)
        total += tl.sum(e.to(tl.float64), 0)
        weighted += tl.sum((e * z).to(tl.float64), 0)
    return total, weighted


@triton.jit(do_not_specialize=["inverse_temperature"])
def token_logprobs_kernel(
    logits_ptr, targets_ptr, logprobs_ptr, shifts_ptr, sums_ptr, entropies_ptr, inverse_temperature, n,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * n
    peak = row_peak(logits_ptr, n, BLOCK)
    total, weighted = exp_sums(logits_ptr, n, peak, inverse_temperature, BLOCK)
    logit = tl.load(logits_ptr + tl.load(targets_ptr + row))
    tl.store(logprobs_ptr + row, (logit - peak) * inverse_temperature - tl.log(total.to(tl.float32)))
    tl.store(shifts_ptr + row, peak)
    tl.store(sums_ptr + row, total.to(tl.float32))
    # -sum p log p = log(sum) - sum(e z) / sum
    tl.store(entropies_ptr + row, (tl.log(total) - weighted / total).to(tl.float32))


@triton.jit(do_not_specialize=["inverse_temperature"])
def logits_gradient_kernel(
    logits_ptr, targets_ptr, shifts_ptr, sums_ptr, entropies_ptr, grads_ptr, entropy_grads_ptr, inverse_temperature, n,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """d(loss) / d(logits) in place of the logits; targets count from the first column and may lie outside."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * n
    peak, total = tl.load(shifts_ptr + row), tl.load(sums_ptr + row)
    grad, target = tl.load(grads_ptr + row), tl.load(targets_ptr + row)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        z, e = exponents(logits_ptr, i, n, peak, inverse_temperature)
        p = e / total
        towards = tl.where(i == target, grad, 0.0) - p * grad
        if entropy_grads_ptr is not None:
            log_p = z - tl.log(total)
            towards -= p * (log_p + tl.load(entropies_ptr + row)) * tl.load(entropy_grads_ptr + row)
        tl.store(logits_ptr + i, towards * inverse_temperature, mask=i < n)


@triton.jit
def crossing(weights, passed, threshold, SIZE: tl.constexpr):
    """The first of these weights at which the running sum passes `threshold`, or the last that is not 0.

    Returns its index and the sum before it.
    """
    i = tl.arange(0, SIZE)
    running = passed + tl.sum(tl.where(i[None, :] <= i[:, None], weights[None, :], 0.0), 1)
    last = tl.max(tl.where(weights > 0, i, 0), 0)
    first = tl.min(tl.where((running > threshold) & (weights > 0), i, SIZE), 0)
    chosen = tl.where(first == SIZE, last, first)
    return chosen, passed + tl.sum(tl.where(i < chosen, weights, 0.0), 0)


@triton.jit(do_not_specialize=["inverse_temperature"])
def sample_kernel(
    logits_ptr, uniforms_ptr, tokens_ptr, inverse_temperature, n,
    BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Invert the cumulative distribution: find the block, the piece of it, the token in that."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * n
    peak = row_peak(logits_ptr, n, BLOCK)
    total, _weighted = exp_sums(logits_ptr, n, peak, inverse_temperature, BLOCK)
    threshold = tl.load(uniforms_ptr + row).to(tl.float64) * total
    passed = tl.zeros((), tl.float64)
    before = tl.zeros((), tl.float64)
    block = 0
    for first in range(0, n, BLOCK):
        _z, e = exponents(logits_ptr, first + tl.arange(0, BLOCK), n, peak, inverse_temperature)
        weight = tl.sum(e.to(tl.float64), 0)
        # Until it is found, the newest block that holds anything: rounding may leave the threshold past the end.
        takes = (weight > 0) & (passed <= threshold)
        before, block = tl.where(takes, passed, before), tl.where(takes, first, block)
        passed += weight
    _z, e = exponents(logits_ptr, block + tl.arange(0, BLOCK), n, peak, inverse_temperature)
    pieces = tl.sum(tl.reshape(e.to(tl.float64), (BLOCK // PIECE, PIECE)), 1)
    piece, before = crossing(pieces, before, threshold, BLOCK // PIECE)
    first_token = block + piece * PIECE
    _z, e = exponents(logits_ptr, first_token + tl.arange(0, PIECE), n, peak, inverse_temperature)
    place, before = crossing(e.to(tl.float64), before, threshold, PIECE)
    tl.store(tokens_ptr + row, (first_token + place).to(tl.int64))
