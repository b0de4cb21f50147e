import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.errors import ConfigurationError, RunError
from qarl.quant.formats import E4M3, INT2, INT3, INT4, INT8, SLACK, NumberFormat
from qarl.quant.qtensor import dequantize, dequantize_rows, quantize, quantize_activations, quantize_rows
from qarl.quant.scales import SMALLEST_AMAX
from qarl.quant.scheme import SCHEMES

FORMATS: list[NumberFormat] = [INT8, INT4, INT3, INT2, E4M3]


def seeded(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_hand_worked_row() -> None:
    # amax 127 makes the scale 1: codes are the rounded values, halves to even.
    codes, scale = quantize_rows(torch.tensor([[127.0, -63.5, 0.5, 1.5, -2.4]]), INT8)
    assert codes.tolist() == [[127, -64, 0, 2, -2]]
    assert scale.tolist() == [1.0]


def test_the_int4_grid_is_sevenths_of_the_largest_value() -> None:
    # The /7 grid, not /7.5 or /8: with amax 1 the code of 1 is 7, of 0.5 is round(3.5) = 4.
    q = quantize(torch.tensor([[1.0, -1.0, 0.5, 0.2]]), SCHEMES["w4a8-int8"], "w")
    assert q.codes.tolist() == [[7, -7, 4, 1]]
    assert q.scale.tolist() == [[pytest.approx(1 / 7)]]


def test_groups_along_the_input_have_their_own_scales() -> None:
    weight = torch.cat([torch.full((2, 128), 7.0), torch.full((2, 128), 0.5)], dim=1)
    q = quantize(weight, SCHEMES["w4a16"], "w")
    assert q.scale.tolist() == [[1.0, pytest.approx(0.5 / 7)]] * 2
    assert q.codes.unique().tolist() == [7]


def test_blocks_have_their_own_scales_and_the_last_rows_may_be_incomplete() -> None:
    weight = torch.zeros(192, 256)
    weight[0, 0] = 448.0
    weight[130, 200] = -1.0
    q = quantize(weight, SCHEMES["fp8-block"], "w")
    assert q.scale.tolist() == [[1.0, 1.0], [1.0, pytest.approx(1 / 448)]]
    assert q.codes[130, 200].float() == -448.0
    assert torch.equal(dequantize(q) != 0, weight != 0)


def test_float64_steps_in_numpy_give_the_same_codes_and_scales() -> None:
    # The documented sequence, written again with numpy's fp32.
    x = seeded(64, 100).numpy()
    amax = np.abs(x).max(axis=1)
    factor = np.float32(127.0) / amax
    codes, scale = quantize_rows(torch.from_numpy(x), INT8)
    assert np.array_equal(codes.numpy(), np.rint(x * factor[:, None]).astype(np.int8))
    assert np.array_equal(scale.numpy(), amax / np.float32(127.0))


@pytest.mark.parametrize("number_format", FORMATS, ids=lambda f: f.name)
def test_quantizing_dequantized_values_gives_the_same_codes_and_scales_for_millions_of_values(number_format) -> None:
    # Magnitudes spread over 60 powers of two so that every significand of amax / largest is met.
    x = seeded(60_000, 48, seed=3) * torch.exp2(seeded(60_000, 1, seed=4) * 10)
    codes, scale = quantize_rows(x, number_format)
    again, scale_again = quantize_rows(dequantize_rows(codes, scale), number_format)
    assert torch.equal(codes.float(), again.float())
    assert torch.equal(scale, scale_again)


@pytest.mark.parametrize("number_format", FORMATS, ids=lambda f: f.name)
def test_the_scale_is_idempotent_for_every_significand_near_the_awkward_ones(number_format) -> None:
    # One-element rows over 2^21 consecutive significands at both ends of a power of two and in its middle.
    for start in (2**23, 2**23 + 2**22, 2**24 - 2**21):
        amax = torch.arange(start, start + 2**21, dtype=torch.int64).to(torch.float32)[:, None] * 2.0**-20
        codes, scale = quantize_rows(amax, number_format)
        assert (codes.float() == number_format.largest).all()
        _, scale_again = quantize_rows(dequantize_rows(codes, scale), number_format)
        assert torch.equal(scale, scale_again)


@given(
    exponent=st.integers(-99, 100),
    values=st.lists(st.floats(-1.0, 1.0, width=32), min_size=1, max_size=17),
    number_format=st.sampled_from(FORMATS),
)
@settings(max_examples=300, deadline=None)
def test_any_row_is_idempotent_and_within_its_formats_error(
    exponent: int, values: list[float], number_format: NumberFormat
) -> None:
    x = torch.tensor([values], dtype=torch.float32) * 2.0**exponent
    codes, scale = quantize_rows(x, number_format)
    back = dequantize_rows(codes, scale)
    again, scale_again = quantize_rows(back, number_format)
    assert torch.equal(codes.float(), again.float())
    assert torch.equal(scale, scale_again)
    if x.abs().max() < SMALLEST_AMAX:
        assert not codes.float().any()
        return
    scaled = (x.double() / scale.double().unsqueeze(-1)).float()
    bound = number_format.rounding_error(scaled).double() * scale.double().unsqueeze(-1)
    assert ((back.double() - x.double()).abs() <= bound * (1 + SLACK) + x.double().abs() * SLACK).all()


W4A16_G32 = SCHEMES["w4a16-g32"]


def test_a_group_whose_scale_is_kept_in_bfloat16_worked_by_hand() -> None:
    # amax 7.05: the scale 7.05 / 7 = 1.00714 is 1 + 1/128 in bfloat16. Divided by that, 0.5037 is 0.49980 and has code
    # 0; by the scale in fp32 it is 0.50013 and has code 1.
    weight = torch.zeros(1, 32)
    weight[0, :3] = torch.tensor([7.05, -7.05, 0.5037])
    rounded = quantize(weight, W4A16_G32.with_scales_in(torch.bfloat16), "w")
    assert rounded.scale.tolist() == [[1 + 1 / 128]]
    assert rounded.codes[0, :3].tolist() == [7, -7, 0]
    assert quantize(weight, W4A16_G32, "w").codes[0, :3].tolist() == [7, -7, 1]
    assert dequantize(rounded)[0, :2].tolist() == [7 + 7 / 128, -7 - 7 / 128]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_and_scales_are_idempotent_and_near_with_rounded_scales_too(dtype: torch.dtype) -> None:
    # float16 has few numbers below 2^-14, and scales there few bits.
    spread = 10 if dtype == torch.bfloat16 else 1
    weight = seeded(20_000, 64, seed=5) * torch.exp2(seeded(20_000, 1, seed=6) * spread)
    scheme = W4A16_G32.with_scales_in(dtype)
    q = quantize(weight, scheme, "w")
    assert torch.equal(q.scale, q.scale.to(dtype).float())
    again = quantize(dequantize(q), scheme, "w")
    assert torch.equal(again.codes, q.codes) and torch.equal(again.scale, q.scale)
    steps = (dequantize(q).double() - weight.double()).abs() / q.scale.double().repeat_interleave(32, dim=1)
    assert steps.max() <= 0.5 * (1 + SLACK) + 7 * SLACK


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_zero_groups_have_scale_one_with_rounded_scales_too(dtype: torch.dtype) -> None:
    weight = seeded(2, 64)
    weight[1, 32:] = 0.0
    q = quantize(weight, W4A16_G32.with_scales_in(dtype), "w")
    assert q.scale[1, 1] == 1.0 and not q.codes[1, 32:].any()
    assert torch.equal(dequantize(q)[1, 32:], torch.zeros(32))


def test_weights_out_of_float16s_reach_are_zero_below_and_refused_above() -> None:
    scheme = W4A16_G32.with_scales_in(torch.float16)
    small = torch.full((1, 32), 2.0**-24)
    assert not quantize(small, scheme, "w").codes.any()
    assert quantize(small, W4A16_G32.with_scales_in(torch.bfloat16), "w").codes.eq(7).all()
    with pytest.raises(RunError, match=r"^w: values too large for scales in float16 in 1 of 2 .*\(1, 0\)"):
        quantize(torch.tensor([[1.0] * 32, [1e6] * 32]), scheme, "w")


def test_zero_rows_have_scale_one_and_codes_zero() -> None:
    x = seeded(3, 8)
    x[1] = 0.0
    for number_format in FORMATS:
        codes, scale = quantize_rows(x, number_format)
        assert scale[1] == 1.0
        assert codes[1].float().tolist() == [0.0] * 8
        assert (codes[[0, 2]].float() != 0).any(dim=1).all()


def test_values_too_small_for_a_normal_scale_count_as_zero() -> None:
    codes, scale = quantize_rows(torch.tensor([[1e-40, -1e-38], [SMALLEST_AMAX, 0.0]]), INT8)
    assert codes.tolist() == [[0, 0], [127, 0]]
    assert scale[0] == 1.0


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x = seeded(64, 576)
    codes, scale = quantize_rows(x, INT8)
    for row in (0, 17, 63):
        alone, scale_alone = quantize_rows(x[row : row + 1], INT8)
        assert torch.equal(alone[0], codes[row])
        assert torch.equal(scale_alone[0], scale[row])


def test_leading_dimensions_stay_as_for_a_cache_with_heads() -> None:
    x = seeded(5, 3, 16)
    codes, scale = quantize_rows(x, INT8)
    flat_codes, flat_scale = quantize_rows(x.reshape(15, 16), INT8)
    assert torch.equal(codes.reshape(15, 16), flat_codes)
    assert torch.equal(scale.reshape(15), flat_scale)


def test_activations_in_groups_have_one_scale_a_group() -> None:
    quantizer = SCHEMES["fp8-block"].activation
    assert quantizer is not None
    x = torch.cat([torch.full((2, 128), 448.0), torch.full((2, 128), 4.48)], dim=1)
    codes, scale = quantize_activations(x, quantizer)
    assert scale.tolist() == [[1.0, pytest.approx(0.01)]] * 2
    assert (codes.float() == 448.0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_values_are_refused_by_name_and_place(bad: float) -> None:
    weight = seeded(4, 8)
    weight[2, 5] = bad
    with pytest.raises(RunError, match=r"layers\.3\.up_proj: non-finite values in 1 of 4 .*\(2, 0\)"):
        quantize(weight, SCHEMES["w8a8-int8"], "layers.3.up_proj")


def test_a_matrix_that_does_not_fill_whole_groups_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"layers\.3\.up_proj: in_features 576 is not a multiple of 128"):
        quantize(seeded(4, 576), SCHEMES["w4a16"], "layers.3.up_proj")


def test_a_copy_rounded_to_bfloat16_first_has_other_codes() -> None:
    # Why the master weights are quantized and never a copy of another dtype.
    weight = seeded(64, 256)
    scheme = SCHEMES["w8a8-int8"]
    rounded = quantize(weight.to(torch.bfloat16), scheme, "w")
    assert not torch.equal(quantize(weight, scheme, "w").codes, rounded.codes)


def test_quantization_takes_no_part_in_autograd_and_leaves_its_input_alone() -> None:
    weight = seeded(4, 8).requires_grad_()
    before = weight.detach().clone()
    q = quantize(weight, SCHEMES["w8a8-int8"], "w")
    assert not q.scale.requires_grad
    assert torch.equal(weight.detach(), before)
