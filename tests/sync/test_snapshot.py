import dataclasses
import math

import pytest
import torch

from qarl.errors import RunError
from qarl.ops.operand import Int4Operand, IntegerOperand
from qarl.quant import SCHEMES, QTensor, QuantConfig, dequantize, plan_schemes, quantize, scheme_named
from qarl.sync.checksum import checksum
from qarl.sync.snapshot import operands_of, take_snapshot, unquantized, verify

EMBEDDING = "model.embed_tokens.weight"
DOWN = "model.layers.1.mlp.down_proj"
QKV = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]


def schemes_for(decoder, scheme: str, **rules: str):
    return plan_schemes(decoder.matrices(), scheme_named(scheme), QuantConfig(rules=rules)).quantized


def untied(small):
    return dataclasses.replace(small, config=dataclasses.replace(small.config, tie_embeddings=False))


def test_a_snapshot_has_hugging_face_names_and_a_checksum_of_all(small):
    decoder = small.decoder()
    snapshot = take_snapshot(decoder, schemes_for(decoder, "w8a8-int8"), version=4)
    expected = {name for name, _ in decoder.named_parameters()}
    expected |= {f"{module}.weight_scale" for module in snapshot.schemes} | {"lm_head.weight"}
    assert snapshot.tensors.keys() == expected
    assert set(snapshot.schemes.values()) == {"w8a8-int8", "w12a12-int12"}
    assert len(snapshot.schemes) == 7 * small.config.num_layers + 1
    assert snapshot.version == 4
    assert snapshot.checksum == checksum(snapshot.tensors)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", f"{DOWN}.weight", "model.norm.weight"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_full_precision_weights_that_are_not_finite_are_not_published(small, name: str, value: float):
    decoder = small.decoder()
    with torch.no_grad():
        dict(decoder.named_parameters())[name].view(-1)[5] = value
    with pytest.raises(RunError, match=f"{name}: non-finite"):
        take_snapshot(decoder, {}, 1)


@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if scheme.quantized])
def test_codes_and_scales_are_those_of_the_masters(small, scheme: str):
    decoder = small.decoder()
    snapshot = take_snapshot(decoder, schemes_for(decoder, scheme), 0)
    masters = dict(decoder.named_parameters())
    for module in (DOWN, *QKV):
        expected = quantize(masters[f"{module}.weight"].detach(), scheme_named(scheme), module)
        assert torch.equal(snapshot.tensors[f"{module}.weight"].float(), expected.codes.float())
        assert torch.equal(snapshot.tensors[f"{module}.weight_scale"], expected.scale)


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w4a8-int8", "w4a16"])
def test_codes_that_are_served_are_those_that_are_verified(small, scheme: str):
    decoder = small.decoder()
    snapshot = take_snapshot(decoder, schemes_for(decoder, scheme), 0)
    verify(decoder, snapshot)
    assert snapshot.operands is not None
    operand = snapshot.operands[QKV[0]]
    assert isinstance(operand, IntegerOperand | Int4Operand)
    served = operand.weight.packed if isinstance(operand, IntegerOperand) else operand.weight.nibbles
    served[1].view(-1)[3] ^= 1
    with pytest.raises(RunError, match="changed between publishing and loading"):
        verify(decoder, snapshot)


def test_without_a_scheme_the_masters_are_published(small):
    decoder = small.decoder()
    snapshot = take_snapshot(decoder, {}, 0)
    assert snapshot.schemes == {}
    for name, parameter in decoder.named_parameters():
        assert torch.equal(snapshot.tensors[name], parameter)


def test_what_is_multiplied_does_not_move_with_the_masters(small):
    small = untied(small)
    for scheme in ("none", "w8a8-int8", "fp8"):
        decoder = small.decoder()
        snapshot = take_snapshot(decoder, schemes_for(decoder, scheme), 0)
        assert snapshot.operands is not None
        gains = {name: tensor for name, tensor in unquantized(snapshot).items() if name != EMBEDDING}
        held = {name: tensor.clone() for name, tensor in gains.items()}
        dense = {name: operand.dense().clone() for name, operand in snapshot.operands.items()}
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.add_(1.0)
        assert len(gains) > 1 and all(torch.equal(tensor, held[name]) for name, tensor in gains.items())
        assert all(torch.equal(operand.dense(), dense[name]) for name, operand in snapshot.operands.items())


def test_embeddings_are_the_masters_and_no_longer_verified_once_they_were_trained(small):
    decoder = small.decoder()
    snapshot = take_snapshot(decoder, schemes_for(decoder, "w8a8-int8"), 0)
    assert snapshot.tensors[EMBEDDING].data_ptr() == decoder.model.embed_tokens.weight.data_ptr()
    with torch.no_grad():
        decoder.model.embed_tokens.weight[3, 4] += 1e-3
    with pytest.raises(RunError, match="changed between publishing and loading"):
        verify(decoder, snapshot)


@pytest.mark.parametrize("head", ["none", "w8a8-int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_head_leaves_out_padding_and_is_its_own_tensor_only_where_it_differs(small, tied: bool, head: str):
    small = small if tied else untied(small)
    decoder = small.decoder()
    snapshot = take_snapshot(decoder, schemes_for(decoder, "w4a16", lm_head=head), 0)
    assert snapshot.operands is not None
    expected = decoder.head_weight().detach()[: small.sampleable]
    if head != "none":
        quantized = quantize(expected, scheme_named(head), "lm_head")
        assert torch.equal(snapshot.tensors["lm_head.weight"], quantized.codes)
        expected = dequantize(quantized)
        assert snapshot.schemes["lm_head"] == head
    torch.testing.assert_close(snapshot.operands["lm_head"].dense(), expected, rtol=1e-6, atol=0)
    assert ("lm_head.weight" in snapshot.tensors) == (head != "none" or not tied)
    assert torch.equal(snapshot.tensors["model.embed_tokens.weight"], decoder.model.embed_tokens.weight)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_operands_made_from_the_tensors_are_the_same_to_the_bit(small, scheme: str):
    config = dataclasses.replace(small.config, family="qwen2", attention_bias=True, tie_embeddings=False)
    small = dataclasses.replace(small, config=config)
    decoder = small.decoder()
    snapshot = take_snapshot(decoder, schemes_for(decoder, scheme, lm_head="fp8"), 0)
    assert snapshot.operands is not None
    assert operands_of(decoder, snapshot) is snapshot.operands
    made = operands_of(decoder, dataclasses.replace(snapshot, operands=None))
    assert made.keys() == snapshot.operands.keys()
    for name, operand in snapshot.operands.items():
        assert type(made[name]) is type(operand)
        assert torch.equal(made[name].dense(), operand.dense())
        assert (made[name].bias is None) == (operand.bias is None) == (".self_attn.q_proj" not in name)
        if operand.bias is not None:
            assert torch.equal(made[name].bias, operand.bias)


def test_a_dense_operand_is_what_its_codes_stand_for(small):
    decoder = small.decoder()
    snapshot = take_snapshot(decoder, schemes_for(decoder, "w4a16"), 0)
    assert snapshot.operands is not None
    codes, scale = snapshot.tensors[f"{DOWN}.weight"], snapshot.tensors[f"{DOWN}.weight_scale"]
    assert torch.equal(snapshot.operands[DOWN].dense(), dequantize(QTensor(codes, scale, scheme_named("w4a16"))))
    assert int(codes.min()) == -7 and int(codes.max()) == 7


def test_unquantized_tensors_are_the_embedding_and_the_gains(small):
    config = dataclasses.replace(small.config, family="qwen3", qk_norm=True)
    decoder = dataclasses.replace(small, config=config).decoder()
    names = unquantized(take_snapshot(decoder, schemes_for(decoder, "fp8"), 0)).keys()
    assert "model.embed_tokens.weight" in names
    assert len(names) == 1 + 4 * small.config.num_layers + 1
    assert all(name.endswith(("norm.weight", "layernorm.weight")) for name in names - {"model.embed_tokens.weight"})


@pytest.mark.parametrize("change", ["flip", "swap", "dtype"])
def test_tensors_that_are_not_the_published_ones_are_refused(small, change: str):
    decoder = small.decoder()
    snapshot = take_snapshot(decoder, schemes_for(decoder, "w8a8-int8"), 3)
    verify(decoder, snapshot)
    tensors, scale = dict(snapshot.tensors), f"{DOWN}.weight_scale"
    if change == "flip":
        tensors[scale] = tensors[scale].clone()
        tensors[scale][0] *= 2
    elif change == "swap":
        other = "model.layers.0.mlp.down_proj.weight_scale"
        tensors[scale], tensors[other] = tensors[other], tensors[scale]
    else:
        tensors[scale] = tensors[scale].double()
    with pytest.raises(RunError, match=r"weights of version 3 changed .*; nothing was loaded"):
        verify(decoder, dataclasses.replace(snapshot, tensors=tensors))


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w4a16", "fp8"])
def test_a_master_that_is_not_finite_is_named(small, scheme: str):
    decoder = small.decoder()
    with torch.no_grad():
        dict(decoder.named_parameters())[f"{DOWN}.weight"][3, 5] = float("nan")
    with pytest.raises(RunError, match=DOWN):
        take_snapshot(decoder, schemes_for(decoder, scheme), 0)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.input_layernorm.weight", f"{DOWN}.weight", f"{DOWN}.weight_scale"]
)
def test_a_snapshot_that_lacks_a_tensor_is_refused_though_its_checksum_is_right(small, name: str):
    decoder = small.decoder()
    snapshot = take_snapshot(decoder, schemes_for(decoder, "w8a8-int8"), 3)
    tensors = {other: tensor for other, tensor in snapshot.tensors.items() if other != name}
    partial = dataclasses.replace(snapshot, tensors=tensors, checksum=checksum(tensors))
    with pytest.raises(RunError, match=f"version 3: tensor {name} is missing; nothing was loaded"):
        verify(decoder, partial)


def test_a_snapshot_with_a_tensor_too_many_is_refused(small):
    decoder = small.decoder()
    snapshot = take_snapshot(decoder, {}, 3)
    tensors = {**snapshot.tensors, "lm_head.weight": torch.ones(2, 2)}
    with pytest.raises(RunError, match=r"version 3: tensor lm_head.weight does not belong to this model"):
        verify(decoder, dataclasses.replace(snapshot, tensors=tensors, checksum=checksum(tensors)))
