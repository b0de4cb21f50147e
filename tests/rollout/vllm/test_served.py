"""Reading back what a layer multiplies with, without starting an engine."""

import pytest
import torch

pytest.importorskip("vllm")

from qarl.quant import quantize, scheme_named
from qarl.rollout.vllm.served import Part, _identity, _take_codes

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["w8a8-int8", "w4a16", "fp8", "fp8-block"])
def test_codes_follow_from_products_in_any_type(scheme: str, dtype: torch.dtype) -> None:
    quantized = quantize(torch.randn(256, 384), scheme_named(scheme), "weight")
    weight = quantized.scheme.weight
    assert weight is not None
    scale = quantized.scale
    scales = weight.granularity.join(
        scale.unsqueeze(-1).expand_as(weight.granularity.split(quantized.codes.float())), 256
    )
    product = (quantized.codes.float() * scales).to(dtype)
    found = {"m.weight": torch.zeros_like(quantized.codes), "m.weight_scale": scale.clone()}
    _take_codes(found, Part("m", slice(None), slice(None), slice(None)), product, quantized.scheme)
    assert torch.equal(found["m.weight"].float(), quantized.codes.float())
    assert torch.equal(found["m.weight_scale"], scale)
    _take_codes(found, Part("m", slice(None), slice(None), slice(None)), product * 1.02, quantized.scheme)
    assert bool(found["m.weight_scale"].isnan().all())


def test_rows_of_the_identity_come_in_pieces() -> None:
    pieces = list(_identity(1100, torch.float32, torch.device("cpu")))
    assert [len(piece) for piece in pieces] == [512, 512, 76]
    assert torch.equal(torch.cat(pieces), torch.eye(1100))
