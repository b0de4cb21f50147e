"""Row-wise operations: normalization, gating, quantization, and their gradients. One program is one row.

A row is read in blocks of a size that depends on its width alone, so its sums have one order whatever the batch.
Everything is launched without fused multiply-adds: `quant/qtensor.py` defines its arithmetic without them.
"""

from __future__ import annotations

import triton
import triton.language as tl

NEAREST = tl.constexpr(12582912.0)
"""1.5 * 2^23: added to an fp32 of at most 2^22 and taken away again, it leaves the nearest integer, halves to even."""

SMALLEST_AMAX = tl.constexpr(2.0**-100)
"""That of `quant/scales.py`: below it a row counts as zero."""


@triton.jit
def quotient(a, b):
    """a / b in fp32, correctly rounded."""
    return tl.div_rn(tl.cast(a, tl.float32), tl.cast(b, tl.float32))


@triton.jit
def sigmoid(x):
    return quotient(1.0, 1.0 + tl.exp(-x))


@triton.jit
def inverse_rms(x_ptr, eps, n, BLOCK: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of the row at `x_ptr`."""
    squares = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + i, mask=i < n, other=0.0)
        squares += x * x
    return quotient(1.0, tl.sqrt_rn(quotient(tl.sum(squares, 0), n) + eps))


@triton.jit
def prepared(x_ptr, gain_ptr, inverse, i, n, PROLOGUE: tl.constexpr):
    """Elements `i` of what a row becomes on its way into a GEMM, 0 past its end: itself, its norm, or gated."""
    inside = i < n
    x = tl.load(x_ptr + i, mask=inside, other=0.0)
    if PROLOGUE == "norm":
        x = x * inverse * tl.load(gain_ptr + i, mask=inside, other=0.0)
    if PROLOGUE == "gated":
        x = x * sigmoid(x) * tl.load(x_ptr + n + i, mask=inside, other=0.0)
    return x


@triton.jit
def scale_and_factor(amax, poison, limit):
    """The scale of elements with this amax, and what turns them into codes; NaN and 0 where `poison` is NaN."""
    counts = amax >= SMALLEST_AMAX
    safe = tl.where(counts, amax, 1.0)
    is_finite = poison == poison
    scale = tl.where(counts, quotient(safe, limit), 1.0)
    factor = tl.where(counts & is_finite, quotient(limit, safe), 0.0)
    return tl.where(is_finite, scale, float("nan")), factor


@triton.jit
def codes_of(x, factor, limit):
    """Nearest codes on the grid [-limit, limit] as fp32, halves to even; 0 where the factor is 0."""
    rounded = (x * factor + NEAREST) - NEAREST
    return tl.where(factor == 0.0, 0.0, tl.minimum(tl.maximum(rounded, -limit), limit))


@triton.jit(do_not_specialize=["eps"])
def prepare_kernel(x_ptr, gain_ptr, y_ptr, eps, n, step, PROLOGUE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of `n` numbers from rows that lie `step` apart."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * step
    inverse = 1.0
    if PROLOGUE == "norm":
        inverse = inverse_rms(x_ptr, eps, n, BLOCK)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        tl.store(y_ptr + row * n + i, prepared(x_ptr, gain_ptr, inverse, i, n, PROLOGUE), mask=i < n)


@triton.jit(do_not_specialize=["eps", "limit"])
def prepare_quantized_kernel(
    x_ptr, gain_ptr, codes_ptr, scales_ptr, eps, limit, n, step, PROLOGUE: tl.constexpr, BLOCK: tl.constexpr
):
    """The same, quantized: what a row becomes is computed twice, for its amax and for its codes."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * step
    inverse = 1.0
    if PROLOGUE == "norm":
        inverse = inverse_rms(x_ptr, eps, n, BLOCK)
    largest = tl.zeros((BLOCK,), tl.float32)
    poison = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n, BLOCK):
        x = prepared(x_ptr, gain_ptr, inverse, first + tl.arange(0, BLOCK), n, PROLOGUE)
        largest = tl.maximum(largest, tl.abs(x))
        poison += x - x
    scale, factor = scale_and_factor(tl.max(largest, 0), tl.sum(poison, 0), limit)
    tl.store(scales_ptr + row, scale)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        codes = codes_of(prepared(x_ptr, gain_ptr, inverse, i, n, PROLOGUE), factor, limit)
        tl.store(codes_ptr + row * n + i, codes.to(codes_ptr.dtype.element_ty), mask=i < n)


@triton.jit(do_not_specialize=["eps"])
def rms_norm_backward_kernel(grad_ptr, x_ptr, gain_ptr, grad_x_ptr, inverses_ptr, eps, n, BLOCK: tl.constexpr):
    """The gradient of x, and 1 / rms of each row."""
    row = tl.program_id(0).to(tl.int64)
    grad_ptr += row * n
    x_ptr += row * n
    inverse = inverse_rms(x_ptr, eps, n, BLOCK)
    tl.store(inverses_ptr + row, inverse)
    products = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + i, mask=i < n, other=0.0) * tl.load(gain_ptr + i, mask=i < n, other=0.0)
        products += grad * (tl.load(x_ptr + i, mask=i < n, other=0.0) * inverse)
    mean = quotient(tl.sum(products, 0), n)
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + i, mask=i < n, other=0.0) * tl.load(gain_ptr + i, mask=i < n, other=0.0)
        unit = tl.load(x_ptr + i, mask=i < n, other=0.0) * inverse
        tl.store(grad_x_ptr + row * n + i, (grad - unit * mean) * inverse, mask=i < n)


@triton.jit
def gated_backward_kernel(grad_ptr, gate_up_ptr, grad_gate_up_ptr, n, BLOCK: tl.constexpr):
    """The gradient of gate and up [2n], gate first."""
    row = tl.program_id(0).to(tl.int64)
    gate_up_ptr += row * 2 * n
    grad_gate_up_ptr += row * 2 * n
    for first in range(0, n, BLOCK):
        i = first + tl.arange(0, BLOCK)
        grad = tl.load(grad_ptr + row * n + i, mask=i < n, other=0.0)
        gate = tl.load(gate_up_ptr + i, mask=i < n, other=0.0)
        up = tl.load(gate_up_ptr + n + i, mask=i < n, other=0.0)
        share = sigmoid(gate)
        silu = gate * share
        tl.store(grad_gate_up_ptr + i, grad * up * (share + silu * (1.0 - share)), mask=i < n)
        tl.store(grad_gate_up_ptr + n + i, grad * silu, mask=i < n)
