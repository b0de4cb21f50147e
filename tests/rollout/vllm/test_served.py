"""Reading back what a layer multiplies with, without starting an engine."""

import pytest
import torch

pytest.importorskip("vllm")

from qarl.quant import quantize, scheme_named
from qarl.records import Snapshot
from qarl.rollout.vllm.served import Part, _dense, _multiplies, _products, _served_codes

pytestmark = pytest.mark.vllm

WHOLE = Part("m", slice(None), slice(None), slice(None))


class Method:
    """Multiplies as a kernel that gives outputs of the layer's type would."""

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self.weight_NK = weight_NK

    def apply(self, layer: torch.nn.Module, rows: torch.Tensor, bias: None) -> torch.Tensor:
        return (rows.float() @ self.weight_NK.t()).to(rows.dtype)


class Layer(torch.nn.Module):
    def __init__(self, weight_NK: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_size_per_partition = weight_NK.shape[1]
        self.params_dtype = dtype
        self.quant_method = Method(weight_NK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", ["w8a8-int8", "w4a16", "fp8", "fp8-block"])
def test_codes_follow_from_products_in_any_type(scheme: str, dtype: torch.dtype) -> None:
    quantized = quantize(torch.randn(256, 768), scheme_named(scheme), "weight")
    weight = quantized.scheme.weight
    assert weight is not None
    codes, scale = quantized.codes, quantized.scale
    scales = weight.granularity.join(scale.unsqueeze(-1).expand_as(weight.granularity.split(codes.float())), 256)
    received = Snapshot(0, {"m.weight": codes, "m.weight_scale": scale}, {"m": scheme}, "")

    good = Layer(codes.float() * scales, dtype)
    assert _multiplies(_products(good), WHOLE, received, quantized.scheme) == scheme.startswith("w")
    found = _served_codes(_products(good), WHOLE, received, quantized.scheme)
    assert torch.equal(found["m.weight"].float(), codes.float())
    assert torch.equal(found["m.weight_scale"], scale)

    other = codes.float().clone()
    other[200, 700] = other[200, 700] - 1 if other[200, 700] > 0 else other[200, 700] + 1
    changed = Layer(other * scales, dtype)
    assert not _multiplies(_products(changed), WHOLE, received, quantized.scheme)

    wider = Layer(codes.float() * scales * 1.02, dtype)
    assert not _multiplies(_products(wider), WHOLE, received, quantized.scheme)
    assert bool(_served_codes(_products(wider), WHOLE, received, quantized.scheme)["m.weight_scale"].isnan().all())


def test_rows_of_the_identity_come_in_pieces() -> None:
    products = _products(Layer(torch.eye(1100), torch.float32))
    assert [(first, len(piece)) for first, piece in products] == [(0, 512), (512, 512), (1024, 76)]
    assert torch.equal(_dense(products), torch.eye(1100))
