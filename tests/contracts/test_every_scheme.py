"""What every row of SCHEMES must hold; a new scheme gets these tests for free."""

import pytest
import torch

from qarl.quant.formats import SLACK
from qarl.quant.qtensor import (
    dequantize,
    dequantize_activations,
    quantize,
    quantize_activations,
)
from qarl.quant.rules import QuantConfig, plan_schemes
from qarl.quant.scheme import SCHEMES, Scheme, scheme_named
from qarl.records import Snapshot
from qarl.sync.checksum import checksum
from qarl.sync.disk import read_snapshot, write_snapshot

QUANTIZING = [scheme for scheme in SCHEMES.values() if scheme.weight is not None]
QUANTIZING_ACTIVATIONS = [scheme for scheme in SCHEMES.values() if scheme.activation is not None]
every_scheme = pytest.mark.parametrize("scheme", QUANTIZING, ids=lambda scheme: scheme.name)

ROWS, COLUMNS = 200, 256


def weight(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randn(ROWS, 1, generator=generator) * 4)
    return torch.randn(ROWS, COLUMNS, generator=generator) * spread


def test_names_are_the_tables_keys() -> None:
    assert all(scheme_named(name).name == name for name in SCHEMES)


@every_scheme
def test_shapes_dtypes_and_layout_are_as_promised(scheme: Scheme) -> None:
    assert scheme.weight is not None
    q = quantize(weight(), scheme, "w")
    assert q.codes.shape == (ROWS, COLUMNS)
    assert q.codes.dtype == scheme.weight.format.code_dtype
    assert tuple(q.scale.shape) == scheme.weight.granularity.scale_shape(ROWS, COLUMNS)
    assert q.scale.dtype == torch.float32
    assert q.codes.is_contiguous()
    assert q.scale.is_contiguous()


@every_scheme
def test_codes_and_scales_survive_dequantizing_and_quantizing(scheme: Scheme) -> None:
    q = quantize(weight(), scheme, "w")
    again = quantize(dequantize(q), scheme, "w")
    assert torch.equal(q.codes.float(), again.codes.float())
    assert torch.equal(q.scale, again.scale)


@every_scheme
def test_the_error_is_within_the_formats_bound(scheme: Scheme) -> None:
    assert scheme.weight is not None
    w = weight()
    q = quantize(w, scheme, "w")
    granularity = scheme.weight.granularity
    scale = granularity.join(torch.ones_like(granularity.split(w)) * q.scale.unsqueeze(-1), ROWS).double()
    bound = scheme.weight.format.rounding_error((w.double() / scale).float()).double() * scale
    assert ((dequantize(q).double() - w.double()).abs() <= bound * (1 + SLACK) + w.double().abs() * SLACK).all()


@every_scheme
def test_zeros_stay_zero_and_nothing_is_nan(scheme: Scheme) -> None:
    w = torch.zeros(ROWS, COLUMNS)
    q = quantize(w, scheme, "w")
    assert not q.codes.float().any()
    assert (q.scale == 1.0).all()
    w[0, 0] = 1.0
    back = dequantize(quantize(w, scheme, "w"))
    assert back[0, 0] == pytest.approx(1.0)
    assert back.count_nonzero() == 1


@every_scheme
def test_the_sign_is_symmetric(scheme: Scheme) -> None:
    plus, minus = quantize(weight(), scheme, "w"), quantize(-weight(), scheme, "w")
    assert torch.equal(plus.codes.float(), -minus.codes.float())
    assert torch.equal(plus.scale, minus.scale)


@pytest.mark.parametrize("scheme", QUANTIZING_ACTIVATIONS, ids=lambda scheme: scheme.name)
def test_a_tokens_activations_do_not_depend_on_its_neighbours_and_are_idempotent(scheme: Scheme) -> None:
    assert scheme.activation is not None
    codes, scale = quantize_activations(weight(), scheme.activation)
    alone, scale_alone = quantize_activations(weight()[7:8], scheme.activation)
    assert torch.equal(alone.float(), codes[7:8].float())
    assert torch.equal(scale_alone, scale[7:8])
    back = dequantize_activations(codes, scale, scheme.activation)
    assert torch.equal(quantize_activations(back, scheme.activation)[0].float(), codes.float())


@every_scheme
def test_a_snapshot_on_disk_comes_back_to_the_bit(scheme: Scheme, tmp_path) -> None:
    module = "model.layers.0.mlp.down_proj"
    q = quantize(weight(), scheme, module)
    tensors = {f"{module}.weight": q.codes, f"{module}.weight_scale": q.scale, "model.norm.weight": torch.ones(5)}
    write_snapshot(Snapshot(3, tensors, {module: scheme.name}, checksum(tensors)), tmp_path / "snapshot")
    back = read_snapshot(tmp_path / "snapshot")
    assert back.version == 3
    assert back.schemes == {module: scheme.name}
    assert checksum(back.tensors) == checksum(tensors)


@every_scheme
def test_a_model_can_be_planned_with_it(scheme: Scheme) -> None:
    plan = plan_schemes([("model.layers.0.mlp.down_proj", (ROWS, COLUMNS))], scheme, QuantConfig())
    assert plan.quantized == {"model.layers.0.mlp.down_proj": scheme}
    assert scheme.stored_bytes((ROWS, COLUMNS)) < 0.6 * 4 * ROWS * COLUMNS
