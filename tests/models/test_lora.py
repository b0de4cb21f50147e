"""LoRA: targets, initialization and names as PEFT has them, merging."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from qarl.errors import ConfigurationError
from qarl.models.lora import (
    LoraConfig,
    adapters_named,
    merged,
    modules_of,
    named_tensors,
    new_adapters,
    projection_shapes,
    train_adapters,
)
from qarl.ops.adapter import LowRank

DOWN = "model.layers.1.mlp.down_proj"


def test_every_projection_is_a_target_unless_some_are_named(small):
    decoder = small.decoder()
    assert LoraConfig().modules(decoder) == list(projection_shapes(decoder)) == [n for n, _ in decoder.matrices()[:-1]]
    named = LoraConfig(targets=("*.v_proj", "*.0.*.q_proj", "*v_proj")).modules(decoder)
    layers = "model.layers.0.self_attn", "model.layers.1.self_attn"
    assert named == [f"{layers[0]}.q_proj", f"{layers[0]}.v_proj", f"{layers[1]}.v_proj"]


@pytest.mark.parametrize("target", ["*.qproj", "lm_head", "model.layers.9.*"])
def test_a_target_that_names_nothing_is_an_error(small, target: str):
    with pytest.raises(
        ConfigurationError, match=r'learner\.lora\.targets: ".*" matches no decoder projection; they are'
    ):
        LoraConfig(targets=("*.q_proj", target)).modules(small.decoder())


def test_a_is_drawn_as_peft_draws_it_and_b_is_zero(small):
    adapters = new_adapters(small.decoder(), LoraConfig(rank=64), seed=3)
    for adapter in adapters.values():
        bound = 1 / math.sqrt(adapter.a.shape[1])
        reference = torch.empty_like(adapter.a)
        nn.init.kaiming_uniform_(reference, a=math.sqrt(5))
        assert adapter.a.abs().max() <= bound and adapter.a.abs().max() > 0.99 * bound
        assert adapter.a.std() == pytest.approx(float(reference.std()), rel=0.05)
        assert not adapter.b.any()
    assert len({float(adapter.a[0, 0]) for adapter in adapters.values()}) == len(adapters)


def test_the_seed_alone_decides_how_adapters_begin(small):
    first, again, other = (named_tensors(new_adapters(small.decoder(), LoraConfig(rank=2), seed)) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)


def test_only_adapters_take_a_gradient(small):
    decoder = small.decoder()
    adapters = new_adapters(decoder, LoraConfig(rank=2, targets=("*.q_proj",)), 0)
    train_adapters(decoder, adapters)
    assert not any(parameter.requires_grad for parameter in decoder.parameters())
    assert all(tensor.requires_grad for tensor in named_tensors(adapters).values())
    assert [len(projection.trained()) for projection in decoder.projections()] == [2, 0, 0, 0] * 2
    assert decoder.projections()[0].low_rank == (adapters["model.layers.0.self_attn.q_proj"], None, None)


def test_names_are_pefts_and_lead_back(small):
    decoder = small.decoder()
    adapters = new_adapters(decoder, LoraConfig(rank=2, targets=("*.down_proj", "*.k_proj")), 0)
    tensors = named_tensors(adapters)
    assert f"base_model.model.{DOWN}.lora_A.weight" in tensors
    found = adapters_named(dict(reversed(tensors.items())), projection_shapes(decoder), 2)
    assert list(found) == list(adapters) == modules_of(tensors)
    assert all(found[module].a is adapter.a and found[module].b is adapter.b for module, adapter in adapters.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_B": None}, r"tensor .*down_proj\.lora_B\.weight is missing"),
        ({"lora_A": None}, r"tensor .*down_proj\.lora_A\.weight is missing"),
        ({"lora_B": torch.zeros(7, 2)}, r"lora_B\.weight has shape \[7, 2\] instead of \[128, 2\]"),
        ({"lora_A": torch.zeros(3, 128)}, r"lora_A\.weight has shape \[3, 128\] instead of \[2, 128\]"),
        ({"magnitude": torch.zeros(3)}, r"tensor .*down_proj\.magnitude\.weight does not belong to this model"),
    ],
)
def test_adapters_of_another_model_are_refused(small, change, message: str):
    decoder = small.decoder()
    tensors = named_tensors(new_adapters(decoder, LoraConfig(rank=2, targets=(DOWN,)), 0))
    changed = tensors | {f"base_model.model.{DOWN}.{part}.weight": tensor for part, tensor in change.items()}
    with pytest.raises(ValueError, match=message):
        adapters_named({k: v for k, v in changed.items() if v is not None}, projection_shapes(decoder), 2)


def test_merging_adds_the_scaled_product_to_its_matrix_alone():
    weights = {f"{DOWN}.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), "model.norm.weight": torch.ones(2)}
    adapter = LowRank(torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0], [0.0], [1.0]]))
    found = merged(weights, named_tensors({DOWN: adapter}), 0.5)
    assert torch.equal(found[f"{DOWN}.weight"], torch.tensor([[2.0, 1.0], [3.0, 4.0], [5.5, 5.5]]))
    assert found["model.norm.weight"] is weights["model.norm.weight"]
    assert float(weights[f"{DOWN}.weight"][0, 0]) == 1.0
