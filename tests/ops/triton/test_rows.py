"""Quantization of rows, bit for bit as `quant/` defines it, and what there is no code for."""

from __future__ import annotations

import math

import pytest
import torch

from qarl.ops.reference import ReferenceKernels
from qarl.quant.formats import INT4, INT8, INT12, INT16
from qarl.quant.qtensor import quantize_rows


@pytest.mark.parametrize("grid", [INT4, INT8, INT12, INT16], ids=lambda grid: grid.name)
def test_codes_and_scales_have_the_bits_of_their_definition(triton_kernels: ReferenceKernels, grid):
    x = torch.randn(12, 70) * torch.exp2(torch.randn(12, 1) * 8)
    x[3] = 0.0
    x[4] *= 2.0**-110  # counts as zero
    x[5, :4] = torch.tensor([grid.largest, 0.5, 1.5, -2.5])  # halves, of a scale of 1
    x[5, 4:] = 0.0
    codes, scales = triton_kernels.quantize_rows(x, grid)
    wanted_codes, wanted_scales = quantize_rows(x, grid)
    assert codes.dtype == wanted_codes.dtype
    assert torch.equal(codes, wanted_codes) and torch.equal(scales, wanted_scales)
    assert codes[5, 1:4].tolist() == [0, 2, -2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_gets_scale_nan_and_leaves_its_neighbours_alone(triton_kernels, bad):
    x = torch.randn(3, 20)
    usual_codes, usual_scales = triton_kernels.quantize_rows(x)
    x[1, 7] = bad
    codes, scales = triton_kernels.quantize_rows(x)
    assert scales[1].isnan() and not codes[1].any()
    assert torch.equal(codes[::2], usual_codes[::2]) and torch.equal(scales[::2], usual_scales[::2])


def test_rows_longer_than_a_block_are_whole(triton_kernels: ReferenceKernels, monkeypatch: pytest.MonkeyPatch):
    kernels = pytest.importorskip("qarl.ops.triton.kernels")
    x, gain = torch.randn(2, 100), torch.randn(100)
    whole = triton_kernels.rms_norm(x, gain, 1e-6)
    monkeypatch.setattr(kernels, "LONGEST_BLOCK", 32)
    torch.testing.assert_close(triton_kernels.rms_norm(x, gain, 1e-6), whole)
    codes, scales = triton_kernels.rms_norm_quantize(x, gain, 1e-6)
    again, wanted = quantize_rows(triton_kernels.rms_norm(x, gain, 1e-6), INT8)
    assert torch.equal(codes, again) and torch.equal(scales, wanted)
