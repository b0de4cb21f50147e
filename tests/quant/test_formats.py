import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qarl.quant.formats import E4M3, INT2, INT3, INT4, INT8, pack_int4, round_to_type, unpack_int4


def test_integers_round_halves_to_even_and_clamp() -> None:
    scaled = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 200.0, -1e9])
    assert INT8.round_to_grid(scaled).tolist() == [0, 2, 2, 0, -2, 126, 127, -127]
    assert INT4.round_to_grid(scaled).tolist() == [0, 2, 2, 0, -2, 7, 7, -7]
    assert INT3.round_to_grid(scaled).tolist() == [0, 2, 2, 0, -2, 3, 3, -3]
    assert INT2.round_to_grid(scaled).tolist() == [0, 1, 1, 0, -1, 1, 1, -1]


def test_e4m3_rounds_halves_to_even_and_clamps_instead_of_making_nan() -> None:
    # Steps: 0.125 in [1, 2), 32 in [256, 448], 2^-9 below 2^-6.
    scaled = torch.tensor([1.0625, 1.1875, 272.0, 304.0, 460.0, 1e9, -1e9, 2.0**-10, 1.5 * 2.0**-9])
    expected = [1.0, 1.25, 256.0, 320.0, 448.0, 448.0, -448.0, 0.0, 2.0**-8]
    assert E4M3.round_to_grid(scaled).float().tolist() == expected


def test_a_narrower_type_has_the_nearest_values_halves_to_even() -> None:
    # bfloat16 has steps of 2^-7 in [1, 2).
    values = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1.5])
    assert round_to_type(values, torch.bfloat16).tolist() == [1.0, 1 + 2.0**-6, 1 + 2.0**-7, -1.5]
    assert round_to_type(values, torch.float32) is values


@pytest.mark.parametrize(
    ("number_format", "largest"), [(INT8, 127.0), (INT4, 7.0), (INT3, 3.0), (INT2, 1.0), (E4M3, 448.0)]
)
def test_the_largest_value_is_a_code_and_codes_are_fixed_points(number_format, largest) -> None:
    assert number_format.largest == largest
    values = torch.linspace(-largest, largest, 1001)
    codes = number_format.round_to_grid(values)
    assert codes.dtype == number_format.code_dtype
    assert codes.float().max() == largest
    assert torch.equal(number_format.round_to_grid(codes.float()).float(), codes.float())


@pytest.mark.parametrize("number_format", [INT8, INT4, E4M3])
def test_no_value_is_further_from_its_code_than_the_stated_error_and_some_nearly_reach_it(number_format) -> None:
    values = (torch.rand(200_000, generator=torch.Generator().manual_seed(1)) * 2 - 1) * number_format.largest
    error = (values - number_format.round_to_grid(values).float()).abs()
    share = error / number_format.rounding_error(values)
    assert share.max() <= 1.0
    assert share.max() > 0.98


def test_packing_follows_the_hand_worked_example() -> None:
    # Codes + 8 are the nibbles, the first one lowest: 1, 2, ..., 8 gives 0x87654321, a negative int32.
    codes = torch.tensor([[-7, -6, -5, -4, -3, -2, -1, 0], [7, 0, 0, 0, 0, 0, 0, -7]], dtype=torch.int8)
    packed = pack_int4(codes)
    assert packed.dtype == torch.int32
    assert packed.tolist() == [[0x87654321 - 2**32], [0x1888888F]]


def test_an_incomplete_last_word_is_filled_with_zero_bits() -> None:
    packed = pack_int4(torch.tensor([[1, 2, 3]], dtype=torch.int8))
    assert packed.tolist() == [[0xBA9]]
    assert unpack_int4(packed, 3).tolist() == [[1, 2, 3]]


@given(rows=st.integers(1, 5), columns=st.integers(1, 40), seed=st.integers(0, 2**31))
def test_unpacking_undoes_packing(rows: int, columns: int, seed: int) -> None:
    codes = torch.randint(-8, 8, (rows, columns), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
    packed = pack_int4(codes)
    assert packed.shape == (rows, (columns + 7) // 8)
    assert torch.equal(unpack_int4(packed, columns), codes)
