"""GEMMs of rows [T, K] with weights [N, K]: exact integers, 4-bit codes expanded on the way, fp32 in a fixed order.

One program is one tile of the result and walks all of K: K is never divided among programs, and a floating-point tile
has one shape whatever T is, so a row's sums have one order. Integer sums are exact in any.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK_M, BLOCK_N = 64, 64
BLOCK_K = 32
"""Of floating-point tiles, which every count of rows shares."""

CODES_BLOCK_K = 64
"""Of tiles of 8-bit and 12-bit codes: as large as registers hold (`tests/ops/triton/test_kernels.py` watches)."""


@triton.jit
def finish(sums, bias_ptr, residual_ptr, y_ptr, m, o, rows, n):
    """Write a tile of `y` [rows, n], plus bias, plus residual."""
    at = m[:, None].to(tl.int64) * n + o[None, :]
    inside = (m < rows)[:, None] & (o < n)[None, :]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + o, mask=o < n, other=0.0)[None, :]
    if residual_ptr is not None:
        sums += tl.load(residual_ptr + at, mask=inside, other=0.0)
    tl.store(y_ptr + at, sums, mask=inside)


@triton.jit
def left_tile(x_ptr, m, k, rows, end, width):
    """Elements `k` of rows `m` [M, K], 0 outside: past the last row, or from element `end` on."""
    mask = (m < rows)[:, None] & (k < end)[None, :]
    return tl.load(x_ptr + m[:, None].to(tl.int64) * width + k[None, :], mask=mask, other=0.0)


@triton.jit
def right_tile(weight_ptr, o, k, n, end, width):
    """Elements `k` of weight rows `o`, transposed [K, N], 0 outside."""
    mask = (o < n)[None, :] & (k < end)[:, None]
    return tl.load(weight_ptr + o[None, :].to(tl.int64) * width + k[:, None], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["rows"])
def matmul_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, y_ptr, rows, n, width,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = x @ weight^T in fp32."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, width, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        x, weight = left_tile(x_ptr, m, k, rows, width, width), right_tile(weight_ptr, o, k, n, width, width)
        sums = tl.dot(x, weight, sums, input_precision=PRECISION)
    finish(sums, bias_ptr, residual_ptr, y_ptr, m, o, rows, n)


@triton.jit(do_not_specialize=["rows"])
def matmul_int4_kernel(
    x_ptr, nibbles_ptr, scales_ptr, bias_ptr, residual_ptr, y_ptr, rows, n, width,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The same, the weight being code * scale. A group of 2 HALF codes is HALF bytes: its first half low, then high."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    groups = width // (2 * HALF)
    for first in range(0, width // 2, BLOCK_K):
        group = first // HALF
        both = right_tile(nibbles_ptr, o, first + tl.arange(0, BLOCK_K), n, width // 2, width // 2)
        scale = tl.load(scales_ptr + o.to(tl.int64) * groups + group, mask=o < n, other=0.0)[None, :]
        low = ((both & 15).to(tl.int8) - 8).to(tl.float32) * scale
        high = ((both >> 4).to(tl.int8) - 8).to(tl.float32) * scale
        k = first + group * HALF + tl.arange(0, BLOCK_K)
        sums = tl.dot(left_tile(x_ptr, m, k, rows, width, width), low, sums, input_precision=PRECISION)
        sums = tl.dot(left_tile(x_ptr, m, k + HALF, rows, width, width), high, sums, input_precision=PRECISION)
    finish(sums, bias_ptr, residual_ptr, y_ptr, m, o, rows, n)


@triton.jit(do_not_specialize=["rows"])
def fp8_matmul_kernel(
    codes_ptr, row_scales_ptr, weight_ptr, column_scales_ptr, bias_ptr, residual_ptr, y_ptr, rows, n, width, size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = (codes @ weight^T) * scales of E4M3 codes, a group of `size` along K at a time.

    Tensor cores may add with fewer bits than fp32 has: their sums go to fp32 after every BLOCK_K products.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    groups = width // size
    y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, width, size):
        sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(start, start + size, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            codes = left_tile(codes_ptr, m, k, rows, start + size, width)
            weight = right_tile(weight_ptr, o, k, n, start + size, width)
            sums = tl.dot(codes, weight, sums, max_num_imprecise_acc=BLOCK_K)
        row_scales = tl.load(row_scales_ptr + m * groups + start // size, mask=m < rows, other=0.0)
        column_scales = tl.load(column_scales_ptr + o * groups + start // size, mask=o < n, other=0.0)
        y += sums * (row_scales[:, None] * column_scales[None, :])
    finish(y, bias_ptr, residual_ptr, y_ptr, m, o, rows, n)


@triton.jit
def dequantized(sums, row_scales_ptr, column_scales_ptr, m, o, rows, n):
    """Integer sums, rounded to fp32 once, times both scales."""
    row_scales = tl.load(row_scales_ptr + m, mask=m < rows, other=0.0)
    column_scales = tl.load(column_scales_ptr + o, mask=o < n, other=0.0)
    return sums.to(tl.float32) * (row_scales[:, None] * column_scales[None, :])


@triton.jit(do_not_specialize=["rows"])
def int8_matmul_kernel(
    codes_ptr, row_scales_ptr, weight_ptr, column_scales_ptr, bias_ptr, residual_ptr, y_ptr, rows, n, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y = (codes @ weight^T) * scales, summed in int32."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for first in range(0, width, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        codes, weight = left_tile(codes_ptr, m, k, rows, width, width), right_tile(weight_ptr, o, k, n, width, width)
        sums = tl.dot(codes, weight, sums, out_dtype=tl.int32)
    y = dequantized(sums, row_scales_ptr, column_scales_ptr, m, o, rows, n)
    finish(y, bias_ptr, residual_ptr, y_ptr, m, o, rows, n)


@triton.jit(do_not_specialize=["rows"])
def int12_matmul_kernel(
    codes_ptr, row_scales_ptr, weight_ptr, column_scales_ptr, bias_ptr, residual_ptr, y_ptr, rows, n, width,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The same for codes in [-2047, 2047], as products of bytes: code = 64 high + low, 0 <= low < 64.

    Of ab = 4096 hh + 64 (hl + lh) + ll the middle is (h + l)(h + l) - hh - ll (Karatsuba 1962): three products, not
    four. Each sum fits int32 up to K = 2^17; together they need int64.
    """
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    highs = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    mixed = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    lows = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
    for first in range(0, width, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        codes, weight = left_tile(codes_ptr, m, k, rows, width, width), right_tile(weight_ptr, o, k, n, width, width)
        high, low = (codes >> 6).to(tl.int8), (codes & 63).to(tl.int8)
        weight_high, weight_low = (weight >> 6).to(tl.int8), (weight & 63).to(tl.int8)
        highs = tl.dot(high, weight_high, highs, out_dtype=tl.int32)
        lows = tl.dot(low, weight_low, lows, out_dtype=tl.int32)
        mixed = tl.dot(high + low, weight_high + weight_low, mixed, out_dtype=tl.int32)
    middle = mixed - highs - lows
    sums = highs.to(tl.int64) * 4096 + middle.to(tl.int64) * 64 + lows.to(tl.int64)
    y = dequantized(sums, row_scales_ptr, column_scales_ptr, m, o, rows, n)
    finish(y, bias_ptr, residual_ptr, y_ptr, m, o, rows, n)
