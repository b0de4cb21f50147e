import pytest
import torch

from qarl.errors import ConfigurationError
from qarl.quant.formats import E4M3, INT2, INT3, INT4, INT8
from qarl.quant.scales import PerBlock, PerGroup, PerRow
from qarl.quant.scheme import SCHEMES, Quantizer, scheme_named


@pytest.mark.parametrize(
    ("name", "weight", "activation"),
    [
        ("none", None, None),
        ("w8a8-int8", Quantizer(INT8, PerRow()), Quantizer(INT8, PerRow())),
        ("w4a8-int8", Quantizer(INT4, PerRow()), Quantizer(INT8, PerRow())),
        ("w4a16", Quantizer(INT4, PerGroup(128)), None),
        ("w4a16-g16", Quantizer(INT4, PerGroup(16)), None),
        ("w3a16", Quantizer(INT3, PerGroup(128)), None),
        ("w3a16-g32", Quantizer(INT3, PerGroup(32)), None),
        ("w2a16", Quantizer(INT2, PerGroup(128)), None),
        ("w2a16-g32", Quantizer(INT2, PerGroup(32)), None),
        ("fp8", Quantizer(E4M3, PerRow()), Quantizer(E4M3, PerRow())),
        ("fp8-block", Quantizer(E4M3, PerBlock(128, 128)), Quantizer(E4M3, PerGroup(128))),
    ],
)
def test_the_named_schemes_are_what_their_names_promise(name: str, weight, activation) -> None:
    scheme = scheme_named(name)
    assert (scheme.weight, scheme.activation) == (weight, activation)


def test_an_unknown_name_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown scheme 'w8a8'; did you mean .*'w8a8-int8'"):
        scheme_named("w8a8")
    with pytest.raises(ConfigurationError, match=r"unknown scheme 'zzz'; known: none, w8a8-int8"):
        scheme_named("zzz")


@pytest.mark.parametrize(("name", "multiple"), [("w4a16", 128), ("w4a16-g64", 64), ("fp8-block", 128)])
def test_inputs_that_do_not_fill_whole_groups_are_refused_with_the_module_and_a_remedy(name, multiple) -> None:
    with pytest.raises(ConfigurationError) as refused:
        SCHEMES[name].check_shape("layers.0.q_proj", (576, 544))
    message = str(refused.value)
    assert message.startswith(f"layers.0.q_proj: in_features 544 is not a multiple of {multiple}")
    assert "schemes that fit are none, w8a8-int8, w4a8-int8, w12a12-int12, w4a16-g32, w4a16-g16, w3a16-g32, " in message
    SCHEMES[name].check_shape("layers.0.q_proj", (576, 5 * multiple))


def test_a_scale_per_row_takes_any_width() -> None:
    assert [SCHEMES[name].multiple_of() for name in ("none", "w8a8-int8", "w4a8-int8", "fp8")] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "stored"),
    [
        ("none", 4 * 256 * 512),
        ("w8a8-int8", 256 * 512 + 4 * 256),
        ("w4a16", 256 * 512 // 2 + 4 * 256 * 4),
        ("w2a16", 256 * 512 // 2 + 4 * 256 * 4),
        ("fp8-block", 256 * 512 + 4 * 2 * 4),
    ],
)
def test_stored_bytes_count_codes_and_scales(name: str, stored: int) -> None:
    assert SCHEMES[name].stored_bytes((256, 512)) == stored


@pytest.mark.parametrize("name", SCHEMES)
def test_scales_are_kept_in_the_engines_type_where_codes_are_packed(name: str) -> None:
    scheme = SCHEMES[name]
    found = scheme.with_scales_in(torch.bfloat16)
    if not scheme.packed:
        assert found is scheme
        return
    assert scheme.weight is not None and found.weight is not None
    assert (scheme.weight.scale_dtype, found.weight.scale_dtype) == (torch.float32, torch.bfloat16)
    assert (found.name, found.activation, found.weight.granularity) == (name, None, scheme.weight.granularity)
    assert found.with_scales_in(torch.float32) == scheme
