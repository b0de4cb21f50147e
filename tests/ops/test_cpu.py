"""The C kernels, one by one: rounding to the bit against its definition, the rest against float64.

What all of them have in common is in `tests/contracts/test_every_operation.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qarl.ops.cpu import LONGEST_SUM, CpuKernels
from qarl.ops.reference import Rounding, Spans, visible_rows
from qarl.quant.formats import INT4, INT8, INT12, INT16
from qarl.quant.qtensor import quantize_rows

WIDTHS = (1, 15, 16, 17, 576, 1000)
EPS = 2.0**-24
"""Half a unit in the last place of 1: what one fp32 operation may be off, relatively."""

every_grid = pytest.mark.parametrize("grid", [INT4, INT8, INT16], ids=lambda grid: grid.name)
every_width = pytest.mark.parametrize("width", WIDTHS)


def within(actual: Tensor, exact: Tensor, bound: Tensor | float) -> bool:
    """Whether every element is as near to its float64 value as `bound` says, and is a number."""
    assert actual.dtype == torch.float32 and exact.dtype == torch.float64
    assert actual.shape == exact.shape
    return bool(((actual.double() - exact).abs() <= bound).all())


# ---------------------------------------------------------------------------------------------- rounding


def awkward_rows(width: int) -> Tensor:
    """Rows of every magnitude, all zero, all tiny, and at the edges of fp32."""
    x = torch.randn(64, width) * torch.exp2(torch.randint(-95, 90, (64, 1)).float())
    x[1] = 0.0
    x[2] = torch.randn(width) * 2.0**-110
    x[3] = 2.0**-100
    x[4] = torch.tensor(2.0**-100).nextafter(torch.tensor(0.0))
    x[5] = torch.randn(width).sign() * torch.finfo(torch.float32).max
    x[6] = torch.randn(width) * 2.0**-140  # denormal
    return x


@every_grid
@every_width
def test_codes_and_scales_are_those_of_the_definition_to_the_bit(cpu: CpuKernels, width, grid):
    x = awkward_rows(width)
    x[7] = torch.randint(-int(grid.largest), int(grid.largest), (width,)) + 0.5
    x[7, 0] = grid.largest  # so that the scale is 1 and the rest are ties
    codes, scales = cpu.quantize_rows(x, grid)
    expected_codes, expected_scales = quantize_rows(x, grid)
    assert codes.dtype == expected_codes.dtype
    assert torch.equal(codes, expected_codes)
    assert torch.equal(scales, expected_scales)
    assert codes.abs().max() == grid.largest


@every_grid
def test_any_bits_are_rounded_as_the_definition_does(cpu: CpuKernels, grid):
    bits = torch.randint(-(2**31), 2**31, (400, 37)).to(torch.int32)
    x = bits.view(torch.float32).nan_to_num(0.0, 0.0, 0.0)
    for rows in (x, x * 2.0**-60, x.sign() * x.abs().sqrt()):
        assert all(map(torch.equal, cpu.quantize_rows(rows, grid), quantize_rows(rows, grid)))


@every_grid
def test_values_next_to_the_edge_between_two_codes_fall_where_the_definition_says(cpu: CpuKernels, grid):
    """There, the factor's last bit decides: limit / amax rounded once, and not one over the scale."""
    amax = torch.rand(500, 1) + 0.5
    edges = (torch.linspace(0, grid.largest - 1, 127).floor() + 0.5) * amax / grid.largest
    below, above = (edges.nextafter(torch.tensor(to)) for to in (0.0, math.inf))
    x = torch.cat([amax, edges, below, above, -edges], 1)
    assert all(map(torch.equal, cpu.quantize_rows(x, grid), quantize_rows(x, grid)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_width
def test_a_row_that_is_not_finite_gets_scale_nan_wherever_the_bad_value_stands(cpu: CpuKernels, width, bad):
    for place in {0, width // 2, width - 1}:
        x = torch.randn(3, width)
        x[1, place] = bad
        for grid in (INT8, INT12):
            codes, scales = cpu.quantize_rows(x, grid)
            assert scales.isnan().tolist() == [False, True, False]
            assert not codes[1].any()
        _, scales = cpu.rms_norm_quantize(x, torch.ones(width), 1e-6)
        assert scales.isnan().tolist() == [False, True, False]
        _, scales = cpu.gated_quantize(torch.cat([torch.ones(3, width), x], 1))
        assert scales.isnan().tolist() == [False, True, False]


@every_width
def test_a_fused_quantization_is_the_operation_and_then_the_rounding(cpu: CpuKernels, width):
    x, gain, gate_up = torch.randn(9, width), torch.rand(width) + 0.5, torch.randn(9, 2 * width)
    normed, gated = cpu.rms_norm(x, gain, 1e-5), cpu.gated(gate_up)
    assert all(map(torch.equal, cpu.rms_norm_quantize(x, gain, 1e-5), cpu.quantize_rows(normed)))
    assert all(map(torch.equal, cpu.gated_quantize(gate_up), cpu.quantize_rows(gated)))


# ---------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e12])
@every_width
def test_rms_norm_is_near_float64(cpu: CpuKernels, width, size):
    x, gain, eps = torch.randn(7, width) * size, torch.randn(width), 1e-6
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * gain
    assert within(cpu.rms_norm(x, gain, eps), exact, exact.abs() * 16 * EPS)


def test_rms_norm_takes_leading_axes_as_rows(cpu: CpuKernels):
    x, gain = torch.randn(3, 5, 16), torch.randn(16)
    assert torch.equal(cpu.rms_norm(x, gain, 1e-6).flatten(0, 1), cpu.rms_norm(x.flatten(0, 1), gain, 1e-6))


@every_width
def test_gated_is_near_float64_for_gates_of_any_size(cpu: CpuKernels, width):
    gate = torch.cat([torch.randn(4, width), torch.linspace(-300, 300, 8 * width).view(8, width)])
    up = torch.randn(12, width)
    exact = F.silu(gate.double()) * up
    # Where exp would overflow the quotient is not quite 0.
    assert within(cpu.gated(torch.cat([gate, up], 1)), exact, exact.abs() * 16 * EPS + 1e-35)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@every_width
def test_dequantize_is_near_float64(cpu: CpuKernels, width, with_bias, with_residual):
    accumulator = torch.randint(-(2**24), 2**24, (5, width), dtype=torch.int32)
    rows, columns = torch.rand(5) * 1e-3, torch.rand(width) * 1e-3
    bias = torch.randn(width) if with_bias else None
    residual = torch.randn(5, width) if with_residual else None
    terms = [accumulator.double() * rows[:, None] * columns]
    terms += [part.double().expand(5, width) for part in (bias, residual) if part is not None]
    exact, size = sum(terms), sum(term.abs() for term in terms)
    assert within(cpu.dequantize(accumulator, rows, columns, bias, residual), exact, size * 4 * EPS)


# ---------------------------------------------------------------------------------------------- GEMM


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("k", [1, 17, 576])
def test_matmul_is_near_float64(cpu: CpuKernels, n, k):
    x, weight = torch.randn(14, k), torch.randn(n, k)
    exact, size = x.double() @ weight.double().t(), x.double().abs() @ weight.double().abs().t()
    packed = cpu.pack(weight)
    assert torch.equal(cpu.unpack(packed, n), weight)
    assert within(cpu.matmul(x, packed, n, None, None), exact, size * k * EPS)


@pytest.mark.parametrize("rows", [1, 13, 300])
def test_matmul_adds_bias_then_residual(cpu: CpuKernels, rows):
    x, weight, bias, residual = torch.randn(rows, 40), torch.randn(50, 40), torch.randn(50), torch.randn(rows, 50)
    exact = x.double() @ weight.double().t() + bias + residual
    assert within(cpu.matmul(x, cpu.pack(weight), 50, bias, residual), exact, 1e-5)


@pytest.mark.parametrize("rows", [1, 11, 12, 300])
@pytest.mark.parametrize(("n", "k", "group"), [(33, 64, 32), (50, 192, 64), (32, 256, 128), (7, 128, 128)])
def test_the_4_bit_product_has_the_bits_of_the_expanded_weight(cpu: CpuKernels, rows, n, k, group):
    codes = torch.randint(-7, 8, (n, k), dtype=torch.int8)
    scales, x = torch.rand(n, k // group), torch.randn(rows, k)
    bias, residual = torch.randn(n), torch.randn(rows, n)
    packed = cpu.pack_int4(codes, scales)
    weight = (codes.float().view(n, -1, group) * scales[..., None]).view(n, k)
    assert torch.equal(cpu.unpack_int4(packed), codes)
    turned = cpu.pack_int4(codes.flip(1).contiguous(), scales)
    assert cpu.changed_int4(packed, turned) == int((codes != codes.flip(1)).sum())
    assert torch.equal(cpu.dense_int4(packed), weight)
    expected = cpu.matmul(x, cpu.pack(weight), n, bias, residual)
    assert torch.equal(cpu.matmul_int4(x, packed, bias, residual), expected)


def integer_product(cpu: CpuKernels, codes: Tensor, weight: Tensor) -> Tensor:
    """With scales that lose nothing, a power of two for each row and column."""
    rows, columns = torch.ones(len(codes)), torch.ones(len(weight))
    rows[1::2], columns[1::3] = 2.0**-20, 2.0**-9
    found = cpu.integer_matmul(codes, rows, cpu.pack_codes(weight), columns, None, None)
    return found / rows[:, None] / columns


every_code = pytest.mark.parametrize(("dtype", "largest"), [(torch.int8, 127), (torch.int16, 2047)])


@pytest.fixture(params=[0, 1, 2])
def each_level(request: pytest.FixtureRequest, cpu: CpuKernels) -> CpuKernels:
    """Pairs, VNNI and AMX, as far as this processor goes."""
    if request.param > cpu.integer_level:
        pytest.skip("this processor has no such instructions")
    cpu.integer_level = request.param
    return cpu


@every_code
@pytest.mark.parametrize("n", [1, 16, 33, 64, 200])
@pytest.mark.parametrize("k", [2, 3, 52, 64, 65, 576])
def test_integer_products_are_exact_and_rounded_once(each_level: CpuKernels, n, k, dtype, largest):
    for rows in (1, 2, 5, 6, 7, 16, 17, 31, 40):
        codes = torch.randint(-largest, largest + 1, (rows, k)).to(dtype)
        weight = torch.randint(-largest, largest + 1, (n, k)).to(dtype)
        exact = codes.long() @ weight.long().t()
        assert torch.equal(integer_product(each_level, codes, weight), exact.float())


@every_code
def test_integer_products_are_exact_at_their_longest_and_largest(each_level: CpuKernels, dtype, largest):
    codes = torch.full((3, LONGEST_SUM), largest, dtype=dtype)
    codes[1].neg_()
    weight = torch.full((2, LONGEST_SUM), largest, dtype=dtype)
    weight[1, ::2] = -largest
    weight[1, 0] = largest
    exact = codes.long() @ weight.long().t()
    assert exact[0].tolist() == [largest**2 * LONGEST_SUM, 2 * largest**2]
    assert torch.equal(integer_product(each_level, codes, weight), exact.float())


@every_code
def test_integer_products_are_scaled_then_biased_then_added_to_the_residual(each_level: CpuKernels, dtype, largest):
    codes = torch.randint(-largest, largest + 1, (9, 52)).to(dtype)
    weight = torch.randint(-largest, largest + 1, (37, 52)).to(dtype)
    rows, columns = torch.rand(9) / largest, torch.rand(37) / largest
    bias, residual = torch.randn(37), torch.randn(9, 37)
    found = each_level.integer_matmul(codes, rows, each_level.pack_codes(weight), columns, bias, residual)
    exact = (codes.double() @ weight.double().t()) * rows[:, None] * columns + bias + residual
    assert within(found, exact, 1e-5)


@pytest.mark.parametrize("n", [1, 16, 33, 200])
@pytest.mark.parametrize("k", [1, 3, 52, 65, 576])
def test_4_bit_weights_have_the_products_of_the_same_codes_in_bytes(each_level: CpuKernels, n, k):
    weight = torch.randint(-8, 8, (n, k)).to(torch.int8)
    scales, bias = torch.rand(n), torch.randn(n)
    packed, nibbles = each_level.pack_codes(weight), each_level.pack_codes(weight, INT4)
    assert 2 * nibbles.packed.nbytes == packed.packed.nbytes
    for rows in (1, 2, 7, 17, 40):
        codes, row_scales, residual = (
            torch.randint(-127, 128, (rows, k)).to(torch.int8),
            torch.rand(rows),
            torch.randn(rows, n),
        )
        found = [each_level.integer_matmul(codes, row_scales, w, scales, bias, residual) for w in (packed, nibbles)]
        assert torch.equal(found[0], found[1])
        exact = codes.double() @ weight.double().t() * row_scales.double()[:, None] * scales + bias + residual
        assert within(found[1], exact, 1e-2)


@pytest.mark.parametrize("grid", [INT4, INT8, INT12], ids=lambda grid: grid.name)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 3), (33, 65), (64, 64), (200, 130)])
def test_packed_codes_can_be_read_back_whole_or_in_part(each_level: CpuKernels, grid, n, k):
    largest = int(grid.largest)
    codes = torch.randint(-largest, largest + 1, (n, k)).to(grid.code_dtype)
    packed = each_level.pack_codes(codes, grid)
    assert torch.equal(each_level.unpack_codes(packed), codes)
    if n > 64:
        assert torch.equal(
            each_level.unpack_codes(packed.outputs(range(64, n - 7), each_level.block)), codes[64 : n - 7]
        )


@pytest.mark.parametrize("grid", [INT4, INT8, INT12], ids=lambda grid: grid.name)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 3), (33, 65), (200, 130)])
@pytest.mark.parametrize("most", [1, 256])
def test_changed_codes_are_counted(each_level: CpuKernels, grid, n, k, most):
    largest = int(grid.largest)
    before = torch.randint(-largest, largest + 1, (n, k)).to(grid.code_dtype)
    steps = torch.randint(-most, most + 1, (n, k)) * (torch.rand(n, k) < 0.1)
    after = (before + steps).clamp(-largest, largest).to(grid.code_dtype)
    packed = [each_level.pack_codes(codes, grid) for codes in (before, after)]
    assert each_level.changed_codes(*packed) == int((before != after).sum())
    assert each_level.changed_codes(packed[1], packed[1]) == 0


@pytest.mark.parametrize("weight", [-8, -7, 7])
@pytest.mark.parametrize("code", [-127, 127])
def test_products_of_4_bit_weights_are_exact_at_their_largest_in_many_blocks_of_rows(
    each_level: CpuKernels, code, weight
):
    rows, k, n = 500, 608, 20
    codes, weights = torch.full((rows, k), code, dtype=torch.int8), torch.full((n, k), weight, dtype=torch.int8)
    packed = each_level.pack_codes(weights, INT4)
    found = each_level.integer_matmul(codes, torch.ones(rows), packed, torch.ones(n), None, None)
    assert torch.equal(found, torch.full((rows, n), float(code * weight * k)))


@pytest.mark.parametrize("grid", [INT16, INT8], ids=lambda grid: grid.name)
@pytest.mark.parametrize("k", [1, 512, 513, 1024, 4100])
def test_products_of_gradients_and_8_bit_codes_are_exact_at_their_largest(each_level: CpuKernels, k, grid):
    largest = int(grid.largest)
    codes = torch.full((7, k), largest, dtype=grid.code_dtype)
    codes[1].neg_()
    codes[2, ::2] *= -1
    codes[3] = torch.randint(-largest, largest + 1, (k,))
    right = torch.full((k, 18), 127, dtype=torch.int8)
    right[:, 1].neg_()
    right[:, 2] = torch.randint(-127, 128, (k,))
    exact = codes.double() @ right.double()
    sums = torch.zeros(7, 18)
    each_level._gradient_matmul(codes, torch.ones(7), each_level._transposed(right, grid), None, sums)
    assert torch.equal(sums, exact.float())


@pytest.mark.parametrize("kind", ["int8", "int4", "int12", "mixed"])
def test_products_of_more_rows_than_a_cache_holds_are_exact(each_level: CpuKernels, kind):
    """Rows of 32 KB, which AMX tiles take in blocks of 32 and a rest."""
    rows, k, n = 70, 32768, 100
    left, right = {"int8": (127, 127), "int4": (127, 7), "int12": (2047, 2047), "mixed": (32512, 127)}[kind]
    codes = torch.randint(-left, left + 1, (rows, k)).to(torch.int8 if left == 127 else torch.int16)
    weight = torch.randint(-right, right + 1, (n, k)).to(torch.int16 if right == 2047 else torch.int8)
    products = codes.double() @ weight.double().t()
    if kind == "mixed":
        added = torch.randn(rows, n) * 1e6
        found, packed = added.clone(), each_level._transposed(weight.t().contiguous(), INT16)
        each_level._gradient_matmul(codes, torch.ones(rows), packed, found, found)
        assert torch.equal(found, products.float() + added)
        return
    bias, residual = torch.randn(n), torch.randn(rows, n)
    packed = each_level.pack_codes(weight, INT4 if kind == "int4" else INT8)
    found = each_level.integer_matmul(codes, torch.ones(rows), packed, torch.ones(n), bias, residual)
    assert torch.equal(found, products.float() + bias + residual)


def test_products_over_no_rows_or_nothing_are_empty_or_zero(each_level: CpuKernels):
    weight = each_level.pack_codes(torch.ones(5, 8, dtype=torch.int8))
    none = each_level.integer_matmul(
        torch.ones(0, 8, dtype=torch.int8), torch.ones(0), weight, torch.ones(5), None, None
    )
    assert none.shape == (0, 5)
    grad = torch.ones(5, 8)
    each_level.add_grad_weight(torch.ones(0, 5), torch.ones(0, 8, dtype=torch.int8), torch.ones(0), [grad], Rounding())
    assert torch.equal(grad, torch.ones(5, 8))


def test_a_scale_that_is_nan_makes_its_row_nan(each_level: CpuKernels):
    codes, weight = torch.ones(3, 8, dtype=torch.int8), torch.ones(5, 8, dtype=torch.int8)
    rows = torch.tensor([1.0, math.nan, 1.0])
    found = each_level.integer_matmul(codes, rows, each_level.pack_codes(weight), torch.ones(5), None, None)
    assert found.isnan().all(1).tolist() == [False, True, False]
    assert found[[0, 2]].eq(8.0).all()


# ---------------------------------------------------------------------------------------------- rotation


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("dim", [2, 8, 24, 32, 64, 80])
def test_split_rotate_is_near_float64_and_writes_only_its_slots(cpu: CpuKernels, dim, with_norms):
    heads, kv_heads, rows, eps = 6, 2, 5, 1e-6
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim)
    positions, slots = torch.tensor([0, 1, 299, 7, 150]), torch.tensor([3, 0, 9, 4, 8])
    angles = torch.rand(300, dim // 2) * 7
    gains = (torch.randn(dim), torch.randn(dim)) if with_norms else None
    keys, values = torch.full((10, kv_heads, dim), 5.0), torch.full((10, kv_heads, dim), 6.0)
    q = cpu.split_rotate(qkv, positions, slots, angles.cos(), angles.sin(), gains, eps, heads, keys, values)

    wide_q, wide_k, v = qkv.double().view(rows, -1, dim).split([heads, kv_heads, kv_heads], 1)
    if gains is not None:
        wide_q, wide_k = (
            x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * g
            for x, g in zip((wide_q, wide_k), gains, strict=True)
        )
    turn = torch.polar(torch.ones(rows, 1, dim // 2, dtype=torch.float64), angles.double()[positions][:, None])

    def turned(x: Tensor) -> Tensor:
        """Element i and i + C/2 are the parts of a complex number."""
        product = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([product.real, product.imag], -1)

    assert within(q, turned(wide_q), 1e-5)
    assert within(keys[slots], turned(wide_k), 1e-5)
    assert torch.equal(values[slots].double(), v)
    untouched = [row for row in range(10) if row not in slots]
    assert (keys[untouched] == 5.0).all() and (values[untouched] == 6.0).all()


# ---------------------------------------------------------------------------------------------- attention

HEADS, KV_HEADS = 6, 2
DIMS = (2, 16, 24, 64, 80, 128)

Row = tuple[int, int]
"""(first row, length) of a span."""


def layout(sequences: Sequence[Sequence[Row]], visible: Sequence[Sequence[int]], families: Sequence[int]) -> Spans:
    """Sequence s reads `sequences[s]`; its queries see `visible[s]` keys; `families` counts queries up to each cut."""
    counts = torch.tensor([0, *(len(spans) for spans in sequences)])
    flat = torch.tensor([span for spans in sequences for span in spans])
    owners = [s for s, seen in enumerate(visible) for _ in seen]
    seen = torch.tensor([count for counts in visible for count in counts])
    starts, lengths = flat[:, 0].contiguous(), flat[:, 1].contiguous()
    return Spans(torch.tensor(owners), seen, counts.cumsum(0), starts, lengths, torch.tensor(families), int(seen.max()))


PACKED = layout(
    # Two prompts of 5 and 18 tokens; the first has two completions, the second one, stored in three pieces.
    [[(0, 5)], [(0, 5), (5, 20)], [(0, 5), (25, 3)], [(28, 18)], [(28, 18), (60, 2), (46, 7), (57, 1)]],
    [range(1, 6), range(6, 26), range(6, 9), range(1, 19), range(19, 29)],
    [0, 28, 56],
)
STORE_ROWS = 62


def attention_inputs(dim: int) -> tuple[Tensor, Tensor, Tensor]:
    stores = torch.randn(2, STORE_ROWS, KV_HEADS, dim)
    return torch.randn(len(PACKED.visible), HEADS, dim) * 2, stores[0], stores[1]


def dense_attention(q: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention query by query, differentiable, in the dtype of its inputs; also the log-sum-exps."""
    outs, sums = [], []
    for t in range(len(q)):
        rows = visible_rows(spans, t)
        k, v = (store[rows].repeat_interleave(q.shape[1] // keys.shape[1], 1) for store in (keys, values))
        scores = torch.einsum("hc,jhc->hj", q[t], k) * scale
        outs.append(torch.einsum("hj,jhc->hc", scores.softmax(-1), v))
        sums.append(scores.logsumexp(-1))
    return torch.stack(outs), torch.stack(sums)


@pytest.mark.parametrize("dim", DIMS)
def test_attention_over_shared_prefixes_and_scattered_pieces_is_near_float64(cpu: CpuKernels, dim):
    q, keys, values = attention_inputs(dim)
    out, lse = cpu.attention(q, keys, values, PACKED, dim**-0.5)
    exact_out, exact_lse = dense_attention(q.double(), keys.double(), values.double(), PACKED, dim**-0.5)
    assert within(out, exact_out, 5e-6)
    assert within(lse, exact_lse, 5e-6)


@pytest.mark.parametrize("dim", DIMS)
def test_the_gradient_of_attention_is_near_float64s(cpu: CpuKernels, dim):
    q, keys, values = attention_inputs(dim)
    grad = torch.randn_like(q)
    out, lse = cpu.attention(q, keys, values, PACKED, dim**-0.5)
    found = cpu.attention_backward(grad, q, keys, values, out, lse, PACKED, dim**-0.5)
    wide = wide_q, wide_k, wide_v = [x.double().requires_grad_(True) for x in (q, keys, values)]
    exact_out, _ = dense_attention(wide_q, wide_k, wide_v, PACKED, dim**-0.5)
    exact = torch.autograd.grad(exact_out, wide, grad.double())
    for mine, theirs in zip(found, exact, strict=True):
        assert within(mine, theirs, 2e-6 * theirs.abs().max())


@pytest.mark.parametrize("dim", [16, 24, 64])
def test_attention_does_not_depend_on_where_the_keys_are_stored(cpu: CpuKernels, dim):
    """The same 40 keys in one run, in two, in three out of order, and in single rows: equal bits."""
    length = 40
    q, keys, values = torch.randn(length, HEADS, dim), *torch.randn(2, length, KV_HEADS, dim).unbind()
    seen = [range(1, length + 1)]
    expected = cpu.attention(q, keys, values, layout([[(0, length)]], seen, [0, length]), 0.3)
    cuts = {
        "moved": [(77, 40)],
        "prefix and suffix": [(50, 17), (3, 23)],
        "three": [(80, 1), (0, 31), (60, 8)],
        "rows": [(2 * row, 1) for row in torch.randperm(length).tolist()],
    }
    for name, spans in cuts.items():
        stores = torch.full((2, 120, KV_HEADS, dim), math.nan)
        rows = torch.cat([torch.arange(start, start + count) for start, count in spans])
        stores[0, rows], stores[1, rows] = keys, values
        found = cpu.attention(q, stores[0], stores[1], layout([spans], seen, [0, length]), 0.3)
        assert all(map(torch.equal, found, expected)), name


def test_a_query_does_not_see_past_its_position(cpu: CpuKernels):
    q, keys, values = attention_inputs(32)
    spans = layout([[(0, 10)]], [[3]], [0, 1])
    expected = cpu.attention(q[:1], keys, values, spans, 1.0)
    keys[3:], values[3:] = math.nan, math.nan
    assert all(map(torch.equal, cpu.attention(q[:1], keys, values, spans, 1.0), expected))


def test_families_only_divide_the_work(cpu: CpuKernels):
    q, keys, values = attention_inputs(24)
    out, lse = cpu.attention(q, keys, values, PACKED, 0.2)
    one_family = dataclasses.replace(PACKED, families=torch.tensor([0, len(q)]))
    torch.set_num_threads(2)
    found = [cpu.attention_backward(q, q, keys, values, out, lse, spans, 0.2) for spans in (PACKED, one_family)]
    assert all(map(torch.equal, *found))


# ---------------------------------------------------------------------------------------------- head

VOCABULARIES = (1, 7, 16, 64, 1000, 1025, 5000)


@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_log_probabilities_and_entropies_are_near_float64(cpu: CpuKernels, size, temperature):
    logits, targets = torch.randn(11, size) * 4, torch.randint(size, (11,))
    scores = cpu.token_logprobs(logits, targets, 1 / temperature)
    exact = (logits.double() / temperature).log_softmax(-1)
    assert within(scores.logprobs, exact.gather(1, targets[:, None])[:, 0], 4e-6)
    assert within(scores.entropies, -(exact.exp() * exact).sum(-1), 1e-5)
    assert torch.equal(scores.shifts, logits.max(-1).values)


def test_log_probabilities_of_logits_of_any_size_stay_finite(cpu: CpuKernels):
    logits = torch.tensor([[1e30, -1e30, 0.0], [-1e30, -1e30, -1e30], [500.0, 100.0, -500.0]])
    scores = cpu.token_logprobs(logits, torch.tensor([0, 1, 2]), 1.0)
    assert scores.logprobs.tolist() == [0.0, pytest.approx(-math.log(3)), -1000.0]
    assert scores.entropies.tolist() == [0.0, pytest.approx(math.log(3)), 0.0]


@pytest.mark.parametrize("place", [0, 3, 16, 98, 99])
def test_one_logit_that_is_nan_makes_its_row_nan(cpu: CpuKernels, place):
    logits = torch.randn(3, 100)
    logits[1, place] = math.nan
    scores = cpu.token_logprobs(logits, torch.tensor([5, 5, 5]), 1.0)
    assert scores.logprobs.isnan().tolist() == [False, True, False]
    tokens, logprobs = cpu.sample(logits, torch.tensor([0.5, 0.5, 0.5]), 1.0)
    assert logprobs.isnan().tolist() == [False, True, False]
    assert ((tokens >= 0) & (tokens < 100)).all()


def test_a_row_of_nothing_but_nan_or_minus_infinity_is_sampled_as_nan(cpu: CpuKernels):
    logits = torch.stack([torch.full((50,), math.nan), torch.full((50,), -math.inf)])
    tokens, logprobs = cpu.sample(logits, torch.tensor([0.5, 0.5]), 1.0)
    assert logprobs.isnan().all()
    assert ((tokens >= 0) & (tokens < 50)).all()


@pytest.mark.parametrize(("size", "draws"), [(5, 4000), (50, 4000), (3000, 1000)])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_evenly_spread_uniforms_draw_tokens_in_proportion_to_their_probability(
    cpu: CpuKernels, size, draws, temperature
):
    logits = torch.randn(size) * 2
    uniforms = (torch.arange(draws) + 0.5) / draws
    tokens, _ = cpu.sample(logits.expand(draws, size).contiguous(), uniforms, 1 / temperature)
    exact = (logits.double() / temperature).softmax(-1)
    found = torch.bincount(tokens, minlength=size).double() / draws
    # A token's interval of length p holds p * draws of the evenly spread points, give or take one.
    assert ((found - exact).abs() <= 1.001 / draws).all()
    assert (tokens.diff() >= 0).all()


def test_random_uniforms_pass_a_chi_square_test(cpu: CpuKernels):
    size, draws = 20, 20000
    logits = torch.randn(size)
    tokens, _ = cpu.sample(logits.expand(draws, size).contiguous(), torch.rand(draws), 1.0)
    expected = logits.double().softmax(-1) * draws
    statistic = ((torch.bincount(tokens, minlength=size) - expected).square() / expected).sum()
    assert expected.min() > 5
    assert statistic < 43.8  # the 99.9 % point with 19 degrees of freedom


@pytest.mark.parametrize("size", [3, 16, 40, 2500])
def test_a_token_of_weight_zero_is_never_drawn(cpu: CpuKernels, size):
    logits = torch.randn(size)
    possible = torch.arange(size) % 3 == 1
    possible[-1] = False
    logits[~possible] = torch.where(torch.rand(size) < 0.5, -math.inf, -500.0)[~possible]
    uniforms = torch.cat([torch.tensor([0.0, 1 - 2.0**-24, 2.0**-24]), torch.rand(500)])
    tokens, logprobs = cpu.sample(logits.expand(len(uniforms), size).contiguous(), uniforms, 1.0)
    assert possible[tokens].all()
    assert logprobs.isfinite().all()
    assert tokens[0] == possible.nonzero()[0], "a uniform of 0 draws the first token that can be drawn"
    assert tokens[1] == possible.nonzero()[-1], "a uniform just below 1 draws the last one"


@pytest.mark.parametrize("size", VOCABULARIES)
def test_a_sampled_tokens_log_probability_has_the_bits_that_scoring_it_has(cpu: CpuKernels, size):
    logits = torch.randn(40, size) * 3
    tokens, logprobs = cpu.sample(logits, torch.rand(40), 1 / 0.7)
    assert torch.equal(logprobs, cpu.token_logprobs(logits, tokens, 1 / 0.7).logprobs)


# ---------------------------------------------------------------------------------------------- calls


def test_what_a_kernel_would_misread_is_refused(cpu: CpuKernels):
    x = torch.randn(4, 16)
    with pytest.raises(AssertionError, match="fp32"):
        cpu.quantize_rows(x.double())
    with pytest.raises(AssertionError, match="contiguous"):
        cpu.quantize_rows(x.t())
    with pytest.raises(AssertionError, match="int64"):
        cpu.token_logprobs(x, torch.zeros(4, dtype=torch.int32), 1.0)
    with pytest.raises(AssertionError, match="disagree on K"):
        cpu.matmul(x, cpu.pack(torch.randn(3, 15)), 3, None, None)


def test_threads_are_torchs(cpu: CpuKernels):
    """One pool for torch and the kernels: what limits the one limits the other."""
    for count in (2, 1):
        torch.set_num_threads(count)
        assert cpu.library.omp_get_max_threads() == count


# ---------------------------------------------------------------------------------------------- integer gradients


TO_NEAREST, BY_DITHER = Rounding(), Rounding(INT8, seed=-(2**63))
every_rounding = pytest.mark.parametrize("rounding", [TO_NEAREST, BY_DITHER], ids=lambda rounding: rounding.grid.name)


@pytest.mark.parametrize(("rounding", "tolerance"), [(TO_NEAREST, 3e-4), (BY_DITHER, 0.03)], ids=["int16", "int8"])
@pytest.mark.parametrize(("rows", "n", "k"), [(1, 5, 7), (13, 33, 64), (70, 100, 52)])
def test_integer_gradients_are_near_float64(each_level: CpuKernels, rows, n, k, rounding, tolerance):
    grad = torch.randn(rows, n) * torch.randn(rows, 1).exp()
    weight, activations = (torch.randint(-127, 128, (m, k), dtype=torch.int8) for m in (n, rows))
    column_scales, row_scales = torch.rand(n) + 0.1, torch.rand(rows) + 0.1
    exact_rows = (grad.double() * column_scales) @ weight.double()
    exact_weight = (grad.double() * row_scales[:, None]).t() @ activations.double()
    found_rows = each_level.grad_rows(grad, each_level.pack_codes(weight), column_scales, rounding)
    before = torch.randn(n, k) * exact_weight.std()
    parts = list(before.clone().split([2, n - 2]))
    each_level.add_grad_weight(grad, activations, row_scales, parts, rounding)
    assert (found_rows - exact_rows).norm() <= tolerance * exact_rows.norm()
    assert (torch.cat(parts) - before - exact_weight).norm() <= tolerance * exact_weight.norm()


@every_rounding
def test_integer_gradients_of_8_bit_steps_are_exact(each_level: CpuKernels, rounding):
    grad = torch.tensor([[127.0, -64.0, 1.0], [0.0, 0.0, 0.0]])  # multiples of amax / 127
    weight = torch.tensor([[1, 2], [-3, 4], [127, -127]], dtype=torch.int8)
    found = each_level.grad_rows(grad, each_level.pack_codes(weight), torch.ones(3), rounding)
    torch.testing.assert_close(found, grad @ weight.float(), rtol=1e-6, atol=0)


@every_rounding
def test_integer_gradients_are_exact_at_their_longest_and_largest(each_level: CpuKernels, rounding):
    grad, codes = torch.ones(LONGEST_SUM, 2), torch.full((LONGEST_SUM, 2), 127, dtype=torch.int8)
    grad[:, 1], codes[:, 1] = -1.0, -127
    found = torch.zeros(2, 2)
    each_level.add_grad_weight(grad, codes, torch.ones(LONGEST_SUM), [found], rounding)
    torch.testing.assert_close(found, 127.0 * LONGEST_SUM * torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("k", "n"), [(1, 1), (7, 65), (64, 64), (130, 200)])
def test_the_transpose_of_codes_is_packed_as_those_codes_are(cpu: CpuKernels, k, n):
    codes = torch.randint(-127, 128, (k, n), dtype=torch.int8)
    found, expected = cpu._transposed(codes, INT8), cpu.pack_codes(codes.t().contiguous())
    assert torch.equal(found.packed, expected.packed)
    for packed in (found, expected):
        assert torch.equal(cpu.unpack_codes(packed), codes.t())
        assert packed.corrections is not None
        assert packed.corrections.flatten().tolist() == [*(-128 * codes.sum(0)).tolist(), *[0] * (-n % 64)]


def uniforms(seed: int, rows: int, n: int) -> Tensor:
    """Float64 [rows, n] in [0, 1): MurmurHash3's finalizer of an element's place, keyed by splitmix64 of its row."""
    found = torch.empty(rows, n, dtype=torch.float64)
    for row in range(rows):
        z = (seed + (row + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        for i in range(n):
            h = z >> 32 ^ i * 0x9E3779B9 % 2**32
            h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
            h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
            found[row, i] = (h ^ h >> 16) >> 8
    return found / 2**24


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345])
def test_dithered_codes_are_those_of_the_definition_to_the_bit(cpu: CpuKernels, seed):
    x, factors = awkward_rows(129), torch.rand(129) / 2 + 0.5
    scaled = x * factors
    amax = scaled.abs().amax(1, keepdim=True)
    steps = torch.where(amax >= 2.0**-100, scaled * (127 / amax), 0.0).clamp(-127, 127).double()
    expected = (steps.floor() + (uniforms(seed, *x.shape) < steps - steps.floor())).to(torch.int8)
    for by, given, seen in (("rows", x, factors), ("columns", scaled.t().contiguous(), torch.ones(129))):
        codes, scales = cpu._gradient_codes(by, given, seen, Rounding(INT8, seed))
        assert torch.equal(codes, expected)
        assert torch.equal(scales, quantize_rows(scaled, INT8)[1])


def test_dithered_gradients_are_right_in_the_mean_and_their_errors_independent(cpu: CpuKernels):
    """Of the mean over many seeds the error, in standard errors, is that of a normal distribution."""
    count, grad = 2000, torch.randn(6, 40) * torch.rand(40).exp()
    weight = torch.randint(-127, 128, (40, 5), dtype=torch.int8)
    packed, ones = cpu.pack_codes(weight), torch.ones(40)
    exact, steps = grad.double() @ weight.double(), grad.double() * 127 / grad.double().abs().amax(1, keepdim=True)
    fractions, step = steps - steps.floor(), grad.double().abs().amax(1, keepdim=True) / 127
    deviation = step * ((fractions * (1 - fractions)) @ weight.double().square()).sqrt()
    found = torch.stack([cpu.grad_rows(grad, packed, ones, Rounding(INT8, seed)) for seed in range(count)]).double()
    mean_errors = (found.mean(0) - exact) / (deviation / math.sqrt(count))
    assert mean_errors.abs().max() < 4.5
    assert mean_errors.square().mean() < 2.0
    torch.testing.assert_close(found.std(0), deviation, rtol=0.1, atol=0)


def test_dithered_gradients_do_not_depend_on_the_number_of_threads(cpu: CpuKernels):
    grad, activations = torch.randn(70, 200), torch.randint(-127, 128, (70, 52), dtype=torch.int8)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        weight = torch.zeros(200, 52)
        cpu.add_grad_weight(grad, activations, torch.ones(70), [weight], BY_DITHER)
        found.append(
            torch.cat(
                [weight, cpu.grad_rows(grad.t().contiguous(), cpu.pack_codes(activations), torch.ones(70), BY_DITHER)]
            )
        )
    assert torch.equal(*found)


@every_rounding
def test_a_gradient_that_is_not_finite_stays_so(cpu: CpuKernels, rounding):
    grad = torch.randn(3, 8)
    grad[1, 2] = float("nan")
    weight = torch.ones(8, 4, dtype=torch.int8)
    assert cpu.grad_rows(grad, cpu.pack_codes(weight), torch.ones(8), rounding)[1].isnan().all()
    grad_weight = torch.zeros(8, 4)
    cpu.add_grad_weight(grad, torch.ones(3, 4, dtype=torch.int8), torch.ones(3), [grad_weight], rounding)
    assert grad_weight[2].isnan().all()
