"""Matrix products: integers that are exact at their extremes, codes that survive packing."""

from __future__ import annotations

import pytest
import torch

from qarl.ops.reference import ReferenceKernels
from qarl.quant.formats import INT8, INT12


@pytest.mark.parametrize("grid", [INT8, INT12], ids=lambda grid: grid.name)
def test_integer_products_are_exact_at_the_edges_of_the_grid(triton_kernels: ReferenceKernels, grid):
    edge = int(grid.largest)
    choices = torch.tensor([-edge, -edge + 1, -65, -64, -63, -1, 0, 1, 63, 64, 65, edge - 1, edge])
    choices = choices[choices.abs() <= edge]
    codes, weight = (choices[torch.randint(len(choices), shape)].to(grid.code_dtype) for shape in ((5, 200), (70, 200)))
    codes[0], weight[0], weight[1] = edge, edge, -edge
    found = triton_kernels.integer_matmul(
        codes, torch.ones(5), triton_kernels.pack_codes(weight, grid), torch.ones(70), None, None
    )
    assert torch.equal(found, (codes.long() @ weight.long().t()).float())
    largest = torch.tensor([edge, -edge]).float() * edge * 200
    assert torch.equal(found[0, :2], largest)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_four_bit_codes_survive_packing_and_multiply_as_their_values(triton_kernels: ReferenceKernels, group):
    codes = torch.randint(-7, 8, (33, 256), dtype=torch.int8)
    scales = torch.rand(33, 256 // group) + 0.5
    packed = triton_kernels.pack_int4(codes, scales)
    assert packed.nibbles.nbytes == codes.numel() // 2
    assert torch.equal(triton_kernels.unpack_int4(packed), codes)
    x, bias, residual = torch.randn(3, 256), torch.randn(33), torch.randn(3, 33)
    dense = (codes.double().unflatten(1, (-1, group)) * scales.double()[..., None]).flatten(1)
    exact = x.double() @ dense.t() + bias + residual
    found = triton_kernels.matmul_int4(x, packed, bias, residual)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


def test_some_output_columns_are_multiplied_as_in_the_whole(triton_kernels: ReferenceKernels):
    codes, scales = torch.randint(-7, 8, (80, 64), dtype=torch.int8), torch.rand(80, 1)
    packed, x = triton_kernels.pack_int4(codes, scales), torch.randn(2, 64)
    whole = triton_kernels.matmul_int4(x, packed, None, None)
    part = triton_kernels.matmul_int4(x, packed.outputs(range(64, 80), triton_kernels.panel), None, None)
    assert torch.equal(part, whole[:, 64:])
