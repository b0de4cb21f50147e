import numpy as np
import pytest
import torch

from qarl.quant.scales import SMALLEST_AMAX, PerBlock, PerGroup, PerRow, scale_and_inverse

GRANULARITIES = [PerRow(), PerGroup(4), PerBlock(2, 4), PerBlock(3, 8)]


def test_elements_that_share_a_scale_come_together() -> None:
    x = torch.arange(16).reshape(2, 8)
    assert PerRow().split(x).tolist() == [[list(range(8))], [list(range(8, 16))]]
    assert PerGroup(4).split(x)[1].tolist() == [[8, 9, 10, 11], [12, 13, 14, 15]]
    assert PerBlock(2, 4).split(x).tolist() == [[[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]]


def test_an_incomplete_block_of_rows_is_filled_with_zeros() -> None:
    x = torch.ones(3, 4)
    assert PerBlock(2, 4).split(x).tolist() == [[[1.0] * 8], [[1.0] * 4 + [0.0] * 4]]


@pytest.mark.parametrize("granularity", GRANULARITIES, ids=repr)
@pytest.mark.parametrize("rows", [1, 2, 6, 7])
def test_joining_undoes_splitting_and_the_scale_shape_is_that_of_the_split(granularity, rows: int) -> None:
    x = torch.arange(rows * 16).reshape(rows, 16)
    split = granularity.split(x)
    assert tuple(split.shape[:2]) == granularity.scale_shape(rows, 16)
    assert torch.equal(granularity.join(split, rows), x)


@pytest.mark.parametrize("largest", [127.0, 7.0, 448.0])
def test_scale_and_inverse_are_correctly_rounded_divisions(largest: float) -> None:
    amax = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 10 + 0.01
    scale, inverse = scale_and_inverse(amax, largest)
    # numpy divides in double and rounds once more, which is the correctly rounded fp32 quotient
    # (2 * 24 + 2 <= 53 bits).
    exact = amax.numpy().astype(np.float64)
    assert np.array_equal(scale.numpy(), (exact / largest).astype(np.float32))
    assert np.array_equal(inverse.numpy(), (largest / exact).astype(np.float32))


def test_scale_of_zero_and_of_less_than_the_smallest_amax_is_one() -> None:
    below = torch.nextafter(torch.tensor(SMALLEST_AMAX), torch.tensor(0.0)).item()
    scale, inverse = scale_and_inverse(torch.tensor([0.0, 1e-40, below, SMALLEST_AMAX]), 127.0)
    assert scale[:3].tolist() == [1.0, 1.0, 1.0]
    assert inverse[:3].tolist() == [0.0, 0.0, 0.0]
    assert scale[3] == torch.tensor(SMALLEST_AMAX) / torch.tensor(127.0)
    assert scale[3] > torch.finfo(torch.float32).tiny
    assert inverse[3].isfinite()


def test_a_scale_in_bfloat16_is_rounded_and_the_inverse_is_that_of_the_rounded_one() -> None:
    # 1 / 7 is 1.0010010|0100.. x 2^-3 in binary: the next bfloat16 has seven bits behind the point.
    scale, inverse = scale_and_inverse(torch.tensor([1.0, 7.0, 7.05]), 7.0, torch.bfloat16)
    assert scale.tolist() == [(1 + 18 / 128) / 8, 1.0, 1.0 + 1 / 128]
    assert inverse.tolist() == [np.float32(1 / scale[0].item()), 1.0, np.float32(1 / scale[2].item())]
    assert scale.dtype == inverse.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_scales_follow_float64(dtype: torch.dtype) -> None:
    amax = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 10 + 0.01
    scale, inverse = scale_and_inverse(amax, 7.0, dtype)
    bits = {torch.bfloat16: 8, torch.float16: 11}[dtype]
    fraction, exponent = np.frexp((amax.numpy().astype(np.float64) / 7.0).astype(np.float32).astype(np.float64))
    rounded = np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits)
    assert np.array_equal(scale.numpy(), rounded.astype(np.float32))
    assert np.array_equal(inverse.numpy(), (1.0 / rounded).astype(np.float32))


def test_what_is_too_small_for_a_scale_in_float16_counts_as_zero() -> None:
    smallest = 2.0**-24  # of float16, which has no such exponents as fp32 and bfloat16
    amax = torch.tensor([0.0, 7 * smallest / 2, 7 * smallest * 0.51, 7 * smallest])
    scale, inverse = scale_and_inverse(amax, 7.0, torch.float16)
    assert scale.tolist() == [1.0, 1.0, smallest, smallest]
    assert inverse.tolist() == [0.0, 0.0, 1 / smallest, 1 / smallest]
    assert scale_and_inverse(amax, 7.0, torch.bfloat16)[1].tolist()[1] > 0.0
