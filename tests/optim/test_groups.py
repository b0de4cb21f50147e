"""Grouping by name and shape, on the names that checkpoints really have."""

import pytest
import torch
from torch import Tensor

from qarl.errors import ConfigurationError
from qarl.optim import Treatment, describe, group_parameters, role_of

MUON = Treatment("muon", lr=1e-3, weight_decay=0.1)
ADAMW = Treatment("adamw", lr=1e-4, weight_decay=0.2)


def parameters(shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, Tensor]]:
    return [(name, torch.zeros(shape, requires_grad=True)) for name, shape in shapes.items()]


DECODER = {
    "model.embed_tokens.weight": (10, 4),
    "model.layers.0.input_layernorm.weight": (4,),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.q_proj.bias": (4,),
    "model.layers.1.self_attn.q_proj.weight": (4, 4),
    "model.layers.1.self_attn.q_norm.weight": (2,),
    "model.layers.1.mlp.gate_proj.weight": (6, 4),
    "model.layers.1.mlp.gate.weight": (3, 4),
    "model.layers.1.mlp.experts.2.down_proj.weight": (4, 6),
    "model.norm.weight": (4,),
    "lm_head.weight": (10, 4),
}


@pytest.mark.parametrize(
    ("name", "num_dims", "role"),
    [
        ("model.embed_tokens.weight", 2, "embedding"),
        ("lm_head.weight", 2, "head"),
        ("lm_head.bias", 1, "bias"),
        ("model.norm.weight", 1, "norm"),
        ("model.layers.3.post_attention_layernorm.weight", 1, "norm"),
        ("model.layers.3.self_attn.k_norm.weight", 1, "norm"),
        ("model.layers.3.self_attn.v_proj.weight", 2, "projection"),
        ("model.layers.3.self_attn.v_proj.bias", 1, "bias"),
        ("model.layers.3.mlp.gate_proj.weight", 2, "projection"),
        ("model.layers.3.mlp.gate.weight", 2, "router"),
        ("model.layers.3.mlp.experts.7.up_proj.weight", 2, "projection"),
        ("model.layers.3.self_attn.sinks", 1, "other"),
        ("value_head.weight", 2, "other"),
        ("weight", 2, "other"),
    ],
)
def test_role_of_a_name(name: str, num_dims: int, role: str) -> None:
    assert role_of(name, num_dims) == role


def test_muon_gets_the_decoder_projections_and_nothing_else() -> None:
    groups = group_parameters(parameters(DECODER), MUON, ADAMW)
    muon = [name for group in groups if group.treatment.method == "muon" for name in group.parameters]
    assert sorted(muon) == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.1.mlp.experts.2.down_proj.weight",
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
    ]
    assert sum(len(group.parameters) for group in groups) == len(DECODER)


def test_decay_spares_norms_biases_embeddings_and_strangers() -> None:
    groups = group_parameters(parameters(DECODER | {"strange": (3, 3)}), MUON, ADAMW)
    decay = {group.role: group.treatment.weight_decay for group in groups}
    assert decay == {
        "projection": 0.1, "head": 0.2, "router": 0.2, "norm": 0.0, "bias": 0.0, "embedding": 0.0, "other": 0.0,
    }  # fmt: skip


def test_every_role_outside_the_projections_has_the_rate_it_was_given() -> None:
    groups = group_parameters(parameters(DECODER), MUON, ADAMW)
    rates = {group.role: group.treatment.lr for group in groups}
    assert rates == {"projection": 1e-3, "head": 1e-4, "router": 1e-4, "norm": 1e-4, "bias": 1e-4, "embedding": 1e-4}


def test_frozen_parameters_are_listed_but_treated_by_none() -> None:
    named = parameters(DECODER)
    named[0][1].requires_grad_(False)
    groups = {group.role: group for group in group_parameters(named, MUON, ADAMW)}
    assert groups["frozen"].treatment.method == "none"
    assert list(groups["frozen"].parameters) == ["model.embed_tokens.weight"]
    assert "embedding" not in groups


def test_the_account_names_every_parameter_with_its_method_and_size() -> None:
    account = describe(group_parameters(parameters(DECODER), MUON, ADAMW)).splitlines()
    assert account[4] == (
        "projection muon  lr 0.001 decay 0.1: 4 tensors, 80 numbers: model.layers.*.self_attn.q_proj.weight (2), "
        "model.layers.*.mlp.gate_proj.weight, model.layers.*.mlp.experts.*.down_proj.weight"
    )
    assert account[1] == "embedding  adamw lr 0.0001 decay 0: 1 tensors, 40 numbers: model.embed_tokens.weight"
    assert len(account) == 6


def test_experts_in_one_tensor_are_refused_by_muon_with_their_name() -> None:
    named = parameters({"model.layers.0.mlp.experts.down_proj": (2, 4, 6)})
    with pytest.raises(ConfigurationError, match=r"experts\.down_proj has shape \[2, 4, 6\].*adamw"):
        group_parameters(named, MUON, ADAMW)
    assert group_parameters(named, ADAMW, ADAMW)[0].role == "projection"


def test_a_wholly_frozen_model_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no trainable parameter"):
        group_parameters([("lm_head.weight", torch.zeros(2, 2))], ADAMW, ADAMW)


def test_a_tied_tensor_under_two_names_is_our_bug() -> None:
    tied = torch.zeros(3, 2, requires_grad=True)
    with pytest.raises(AssertionError, match=r"lm_head\.weight was handed over twice"):
        group_parameters([("model.embed_tokens.weight", tied), ("lm_head.weight", tied)], ADAMW, ADAMW)


def test_rates_are_scaled_by_the_last_pattern_that_matches_and_each_scale_has_a_group() -> None:
    scales = {"*.q_proj.*": 0.5, "*.layers.1.*q_proj.weight": 3.0, "model.norm.weight": 2.0}
    groups = group_parameters(parameters(DECODER), MUON, ADAMW, scales)
    rates = {name: group.treatment.lr for group in groups for name in group.parameters}
    assert rates["model.layers.0.self_attn.q_proj.weight"] == 0.5e-3
    assert rates["model.layers.1.self_attn.q_proj.weight"] == 3e-3
    assert rates["model.layers.1.mlp.gate_proj.weight"] == 1e-3
    assert rates["model.layers.0.self_attn.q_proj.bias"] == 0.5e-4
    assert rates["model.norm.weight"] == 2e-4
    assert rates["model.layers.0.input_layernorm.weight"] == 1e-4
    assert len(rates) == len(DECODER)
    decays = {group.treatment.weight_decay for group in groups if group.role == "projection"}
    assert decays == {0.1}  # a unit of rate decays as before
    account = describe(groups).splitlines()
    assert (
        "projection muon  lr 0.003 decay 0.1: 1 tensors, 16 numbers: model.layers.*.self_attn.q_proj.weight" in account
    )


def test_a_scale_of_nothing_that_is_trained_is_refused() -> None:
    with pytest.raises(
        ConfigurationError,
        match=r'^\[learner\.lr_scales\] "\*\.q_prj\.weight" matches no trained parameter; .*q_proj\.weight',
    ):
        group_parameters(parameters(DECODER), MUON, ADAMW, {"*.q_prj.weight": 2.0})
    frozen = [("lm_head.weight", torch.zeros(2, 2)), *parameters({"model.norm.weight": (4,)})]
    with pytest.raises(ConfigurationError, match=r'"lm_head\.weight" matches no trained parameter'):
        group_parameters(frozen, MUON, ADAMW, {"lm_head.weight": 2.0})
    with pytest.raises(ConfigurationError, match=r'"\*\.q_proj\.weight" has no effect: later ones, such as "\*"'):
        group_parameters(parameters(DECODER), MUON, ADAMW, {"*.q_proj.weight": 2.0, "*": 3.0})
