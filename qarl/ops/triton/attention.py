"""Rotary split, attention over key/value stores, and its gradient.

A query's keys are taken by position, a block at a time from position 0, whatever rows they live in: prefill, decode,
shared prompts and packed training batches give the same bits. A tile holds the query heads of one key/value head, of
one query or of several: a row of a matrix product does not depend on the other rows, and keys that a row does not see
have weight 0 in it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from qarl.ops.triton.rows import codes_of, quotient, scale_and_factor

TILE = 16
"""Rows (queries times heads) of a tile; more where one key/value head has more query heads."""

BLOCK_KEYS = 32

WARPS_OF_KEYS = 8
"""Of the kernel whose programs hold a block of keys and values and both their gradients."""

LOWEST = tl.constexpr(-1e38)
"""Below every score, and finite: the difference of two of them is 0."""


@triton.jit
def put(store_ptr, scales_ptr, vector, c, a, b, factor, half, HAS_SCALES: tl.constexpr):
    """Write the two halves of a head to vector number `vector` of a store, as they are or as codes."""
    at = store_ptr + vector * (2 * half) + c
    if HAS_SCALES:
        scale, factor = scale_and_factor(
            tl.maximum(tl.max(tl.abs(a), 0), tl.max(tl.abs(b), 0)), tl.sum(a - a, 0) + tl.sum(b - b, 0), 127.0
        )
        tl.store(scales_ptr + vector, scale)
        a, b = codes_of(a, factor, 127.0), codes_of(b, factor, 127.0)
    tl.store(at, a.to(store_ptr.dtype.element_ty), mask=c < half)
    tl.store(at + half, b.to(store_ptr.dtype.element_ty), mask=c < half)


@triton.jit
def normed(a, b, gain_ptr, c, half, eps):
    """RMSNorm of a head given as its halves."""
    mean = quotient(tl.sum(a * a + b * b, 0), 2 * half)
    inverse = quotient(1.0, tl.sqrt_rn(mean + eps))
    low = tl.load(gain_ptr + c, mask=c < half, other=0.0)
    high = tl.load(gain_ptr + half + c, mask=c < half, other=0.0)
    return a * inverse * low, b * inverse * high


@triton.jit(do_not_specialize=["eps"])
def split_rotate_kernel(
    qkv_ptr, positions_ptr, slots_ptr, cosines_ptr, sines_ptr, q_gain_ptr, k_gain_ptr, q_ptr,
    keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr, row_step, head_step, eps, heads, kv_heads, half,
    HAS_SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One head of one token. Vectors of a store are `row_step` and `head_step` vectors apart."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    c = tl.arange(0, BLOCK)
    x_ptr = qkv_ptr + (row * (heads + 2 * kv_heads) + head) * (2 * half) + c
    a, b = tl.load(x_ptr, mask=c < half, other=0.0), tl.load(x_ptr + half, mask=c < half, other=0.0)
    slot = tl.load(slots_ptr + row)
    if head < heads + kv_heads:
        if q_gain_ptr is not None:
            a, b = normed(a, b, q_gain_ptr if head < heads else k_gain_ptr, c, half, eps)
        at = tl.load(positions_ptr + row) * half + c
        cosine = tl.load(cosines_ptr + at, mask=c < half, other=0.0)
        sine = tl.load(sines_ptr + at, mask=c < half, other=0.0)
        first, second = a * cosine - b * sine, b * cosine + a * sine
        if head < heads:
            out = q_ptr + (row * heads + head) * (2 * half) + c
            tl.store(out, first, mask=c < half)
            tl.store(out + half, second, mask=c < half)
        else:
            vector = slot * row_step + (head - heads) * head_step
            put(keys_ptr, key_scales_ptr, vector, c, first, second, 0.0, half, HAS_SCALES)
    else:
        vector = slot * row_step + (head - heads - kv_heads) * head_step
        put(values_ptr, value_scales_ptr, vector, c, a, b, 0.0, half, HAS_SCALES)


@triton.jit
def stored(store_ptr, scales_ptr, vectors, inside, c, DIM: tl.constexpr, HAS_SCALES: tl.constexpr):
    """Vectors of a store as fp32 [keys, C], 0 where not `inside`."""
    mask = inside[:, None] & (c < DIM)[None, :]
    x = tl.load(store_ptr + vectors[:, None] * DIM + c[None, :], mask=mask, other=0).to(tl.float32)
    if HAS_SCALES:
        x = x * tl.load(scales_ptr + vectors, mask=inside, other=0.0)[:, None]
    return x


@triton.jit
def rows_of(position, end, span, base, starts_ptr, lengths_ptr):
    """Store rows of a block of positions up to `end`, and the span that holds position end - 1.

    `span` holds the last position before the block, or position 0; it begins at position `base` of its sequence.
    """
    start, length = tl.load(starts_ptr + span), tl.load(lengths_ptr + span)
    rows = start + position - base
    while base + length < end:
        base += length
        span += 1
        start, length = tl.load(starts_ptr + span), tl.load(lengths_ptr + span)
        rows = tl.where(position >= base, start + position - base, rows)
    return rows, span, base


@triton.jit
def tile_of(
    sequences_ptr, visible_ptr, queries, per_tile, REPEAT: tl.constexpr, GROUP: tl.constexpr, TILE: tl.constexpr
):
    """Of each row of this program's tile: query, head of its group, whether it is one, its sequence and visible keys.

    Rows that are none stand for the last query, so that they add no sequence.
    """
    m = tl.arange(0, TILE)
    query = tl.program_id(0) * per_tile + m // GROUP
    head = m % GROUP
    is_one = (m // GROUP < per_tile) & (query < queries) & (head < REPEAT)
    query = tl.minimum(query, tl.minimum(queries, (tl.program_id(0) + 1) * per_tile) - 1).to(tl.int64)
    return query, tl.minimum(head, REPEAT - 1), is_one, tl.load(sequences_ptr + query), tl.load(visible_ptr + query)


@triton.jit(do_not_specialize=["scale", "queries", "per_tile"])
def attention_kernel(
    q_ptr, keys_ptr, key_scales_ptr, values_ptr, value_scales_ptr,
    sequences_ptr, visible_ptr, pointers_ptr, starts_ptr, lengths_ptr, out_ptr, lse_ptr,
    scale, queries, per_tile, kv_heads, row_step, head_step,
    PRECISION: tl.constexpr, HAS_SCALES: tl.constexpr, REPEAT: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """Softmax attention of a tile of rows, one sequence of theirs after another."""
    g = tl.program_id(1)
    query, head, is_one, sequence, visible = tile_of(sequences_ptr, visible_ptr, queries, per_tile, REPEAT, GROUP, TILE)
    c = tl.arange(0, BLOCK_DIM)
    row = query * (kv_heads * REPEAT) + g * REPEAT + head
    q = tl.load(q_ptr + row[:, None] * DIM + c[None, :], mask=(c < DIM)[None, :], other=0.0)
    peak = tl.full((TILE,), LOWEST, tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    mixed = tl.zeros((TILE, BLOCK_DIM), tl.float32)
    for s in range(tl.min(sequence, 0), tl.max(sequence, 0) + 1):
        seen = tl.where(sequence == s, visible, 0)
        longest = tl.max(seen, 0)
        span = tl.load(pointers_ptr + s)
        base = tl.zeros((), tl.int64)
        for first in range(0, longest, BLOCK_KEYS):
            position = first + tl.arange(0, BLOCK_KEYS)
            rows, span, base = rows_of(
                position, tl.minimum(first + BLOCK_KEYS, longest), span, base, starts_ptr, lengths_ptr
            )
            vectors, inside = rows * row_step + g * head_step, position < longest
            keys = stored(keys_ptr, key_scales_ptr, vectors, inside, c, DIM, HAS_SCALES)
            scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
            scores = tl.where(position[None, :] < seen[:, None], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp(scores - new_peak[:, None])
            fading = tl.exp(peak - new_peak)
            total = total * fading + tl.sum(weights, 1)
            values = stored(values_ptr, value_scales_ptr, vectors, inside, c, DIM, HAS_SCALES)
            mixed = tl.dot(weights, values, mixed * fading[:, None], input_precision=PRECISION)
            peak = new_peak
    out = quotient(mixed, total[:, None])
    tl.store(out_ptr + row[:, None] * DIM + c[None, :], out, mask=is_one[:, None] & (c < DIM)[None, :])
    tl.store(lse_ptr + row, peak + tl.log(total), mask=is_one)


@triton.jit
def gradient_of_scores(q, grad, keys, values, lse, delta, scale, is_seen, PRECISION: tl.constexpr):
    """Weights p, and the gradient of the scaled scores times `scale`, both [rows, keys]."""
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
    p = tl.where(is_seen, tl.exp(scores - lse[:, None]), 0.0)
    dp = tl.dot(grad, tl.trans(values), input_precision=PRECISION)
    return p, p * (dp - delta[:, None]) * scale


@triton.jit(do_not_specialize=["scale", "queries", "per_tile"])
def attention_dq_kernel(
    grad_ptr, q_ptr, keys_ptr, values_ptr, lse_ptr, delta_ptr,
    sequences_ptr, visible_ptr, pointers_ptr, starts_ptr, lengths_ptr, dq_ptr,
    scale, queries, per_tile, kv_heads, row_step, head_step,
    PRECISION: tl.constexpr, REPEAT: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of queries."""
    g = tl.program_id(1)
    query, head, is_one, sequence, visible = tile_of(sequences_ptr, visible_ptr, queries, per_tile, REPEAT, GROUP, TILE)
    c = tl.arange(0, BLOCK_DIM)
    row = query * (kv_heads * REPEAT) + g * REPEAT + head
    at, mask = row[:, None] * DIM + c[None, :], (c < DIM)[None, :]
    q, grad = tl.load(q_ptr + at, mask=mask, other=0.0), tl.load(grad_ptr + at, mask=mask, other=0.0)
    lse, delta = tl.load(lse_ptr + row), tl.load(delta_ptr + row)
    dq = tl.zeros((TILE, BLOCK_DIM), tl.float32)
    for s in range(tl.min(sequence, 0), tl.max(sequence, 0) + 1):
        seen = tl.where(sequence == s, visible, 0)
        longest = tl.max(seen, 0)
        span = tl.load(pointers_ptr + s)
        base = tl.zeros((), tl.int64)
        for first in range(0, longest, BLOCK_KEYS):
            position = first + tl.arange(0, BLOCK_KEYS)
            rows, span, base = rows_of(
                position, tl.minimum(first + BLOCK_KEYS, longest), span, base, starts_ptr, lengths_ptr
            )
            vectors, inside = rows * row_step + g * head_step, position < longest
            keys = stored(keys_ptr, None, vectors, inside, c, DIM, False)
            values = stored(values_ptr, None, vectors, inside, c, DIM, False)
            is_seen = position[None, :] < seen[:, None]
            _, ds = gradient_of_scores(q, grad, keys, values, lse, delta, scale, is_seen, PRECISION)
            dq = tl.dot(ds, keys, dq, input_precision=PRECISION)
    tl.store(dq_ptr + at, dq, mask=is_one[:, None] & mask)


@triton.jit(do_not_specialize=["scale", "stored_rows", "sequence_count"])
def attention_dkv_kernel(
    grad_ptr, q_ptr, keys_ptr, values_ptr, lse_ptr, delta_ptr,
    order_ptr, ends_ptr, visible_ptr, pointers_ptr, starts_ptr, lengths_ptr, dk_ptr, dv_ptr,
    scale, stored_rows, sequence_count, kv_heads,
    PRECISION: tl.constexpr, REPEAT: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    TILE: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_DIM: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and values: a sum over their queries in the order of sequences.

    `order` has the queries sorted by sequence; those of sequence s end at `ends[s]`.
    """
    g = tl.program_id(1)
    key_row = (tl.program_id(0) * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)).to(tl.int64)
    first_row = tl.program_id(0) * BLOCK_KEYS
    c = tl.arange(0, BLOCK_DIM)
    inside = key_row < stored_rows
    vectors = key_row * kv_heads + g
    keys = stored(keys_ptr, None, vectors, inside, c, DIM, False)
    values = stored(values_ptr, None, vectors, inside, c, DIM, False)
    dk = tl.zeros((BLOCK_KEYS, BLOCK_DIM), tl.float32)
    dv = tl.zeros((BLOCK_KEYS, BLOCK_DIM), tl.float32)
    m = tl.arange(0, TILE)
    begin = tl.zeros((), tl.int64)
    for s in range(0, sequence_count):
        end = tl.load(ends_ptr + s)
        base = tl.zeros((), tl.int64)
        for span in range(tl.load(pointers_ptr + s), tl.load(pointers_ptr + s + 1)):
            start, length = tl.load(starts_ptr + span), tl.load(lengths_ptr + span)
            if (start < first_row + BLOCK_KEYS) & (start + length > first_row):
                position = tl.where((key_row >= start) & (key_row < start + length), base + key_row - start, -1)
                for first in range(begin, end, TILE // GROUP):
                    place = first + m // GROUP
                    is_one = (place < end) & (m % GROUP < REPEAT)
                    query = tl.load(order_ptr + tl.minimum(place, end - 1))
                    row = query * (kv_heads * REPEAT) + g * REPEAT + tl.minimum(m % GROUP, REPEAT - 1)
                    at, mask = row[:, None] * DIM + c[None, :], is_one[:, None] & (c < DIM)[None, :]
                    q, grad = tl.load(q_ptr + at, mask=mask, other=0.0), tl.load(grad_ptr + at, mask=mask, other=0.0)
                    lse, delta = tl.load(lse_ptr + row), tl.load(delta_ptr + row)
                    seen = tl.where(is_one, tl.load(visible_ptr + query), 0)
                    is_seen = (position[None, :] >= 0) & (position[None, :] < seen[:, None])
                    p, ds = gradient_of_scores(q, grad, keys, values, lse, delta, scale, is_seen, PRECISION)
                    dk = tl.dot(tl.trans(ds), q, dk, input_precision=PRECISION)
                    dv = tl.dot(tl.trans(p), grad, dv, input_precision=PRECISION)
            base += length
        begin = end
    at, mask = vectors[:, None] * DIM + c[None, :], inside[:, None] & (c < DIM)[None, :]
    tl.store(dk_ptr + at, dk, mask=mask)
    tl.store(dv_ptr + at, dv, mask=mask)
