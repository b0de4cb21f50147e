"""Update-aware quantization: the function and the codes stay, and an update moves more codes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qarl.learner.learner import LocalLearner
from qarl.metrics import values
from qarl.models.fold import fold, foldable
from qarl.quant import SCHEMES

TOKENS = torch.arange(20) % 83
ALL = ("none", "w8a8-int8", "w4a8-int8", "w4a16", "w3a16", "w2a16", "fp8", "fp8-block")
OPTIMIZERS = ({"type": "adamw"}, {"type": "muon"})


def readers(small) -> dict[str, tuple[str, ...]]:
    """What reads each norm of a model all of whose matrices are quantized."""
    return foldable(small.config, [module for module, _ in small.decoder().matrices()])


def folded(small, scheme: str, factor: float, **config: Any) -> LocalLearner:
    """A learner of `scheme` with masters that were folded as if all were quantized."""
    learner = small.learner(scheme, **config)
    fold(dict(learner.decoder.named_parameters()), readers(small), factor)
    learner._snapshot = learner._requantize()
    return learner


def codes_of(small, learner: LocalLearner) -> dict[str, Tensor]:
    """Codes of the weights that read a norm; copies."""
    names = [weight for weights in readers(small).values() for weight in weights]
    return {name: learner.publish().tensors[name].float().clone() for name in names}


def test_norms_are_named_with_all_that_reads_them_where_that_is_quantized(small) -> None:
    modules, found = [module for module, _ in small.decoder().matrices()], readers(small)
    assert list(found) == [
        f"model.layers.{layer}.{norm}.weight"
        for layer in (0, 1)
        for norm in ("input_layernorm", "post_attention_layernorm")
    ]
    assert found["model.layers.1.post_attention_layernorm.weight"] == (
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    )
    assert sum(map(len, found.values())) == 10
    without = foldable(small.config, [module for module in modules if module != "model.layers.0.self_attn.k_proj"])
    assert list(without) == list(found)[1:]
    assert foldable(small.config, ["lm_head", "model.layers.0.mlp.down_proj"]) == {}


def test_gains_grow_and_matrices_shrink_and_nothing_else_changes(small) -> None:
    before = {name: weight.clone() for name, weight in small.weights().items()}
    after = small.weights()
    gains = readers(small)
    fold(after, gains, 1.5)
    divided = {weight for weights in gains.values() for weight in weights}
    for name, weight in before.items():
        expected = weight * 1.5 if name in gains else weight / 1.5 if name in divided else weight
        assert torch.equal(after[name], expected), name


@pytest.mark.parametrize("scheme", ALL)
def test_a_power_of_two_changes_no_bit_of_any_logit(small, scheme: str) -> None:
    plain, doubled = small.learner(scheme), folded(small, scheme, 2.0)
    assert torch.equal(plain.decoder.full_logits(TOKENS), doubled.decoder.full_logits(TOKENS))


def test_logits_stay_within_the_rounding_of_fp32(small) -> None:
    plain = small.learner().decoder.full_logits(TOKENS)
    off = (folded(small, "none", 1.5).decoder.full_logits(TOKENS) - plain).abs().max() / plain.abs().max()
    assert 0.0 < off < 64 * 2.0**-24


@pytest.mark.parametrize("scheme", [name for name in ALL if name != "none"])
def test_codes_stay_and_scales_shrink(small, scheme: str) -> None:
    plain, scaled = small.learner(scheme), folded(small, scheme, 1.5)
    before, after = codes_of(small, plain), codes_of(small, scaled)
    assert len(before) == 10
    different = sum(int((before[name] != after[name]).sum()) for name in before)
    # Where a value lies within fp32's rounding of the middle between two codes: of 131,072 about one.
    assert different <= 2
    for name in before:
        scales = plain.publish().tensors[f"{name}_scale"], scaled.publish().tensors[f"{name}_scale"]
        torch.testing.assert_close(scales[1] * 1.5, scales[0], rtol=4 * 2.0**-24, atol=0.0)
    down = "model.layers.0.mlp.down_proj.weight_scale"
    assert torch.equal(plain.publish().tensors[down], scaled.publish().tensors[down])


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one["type"])
@pytest.mark.parametrize(("scheme", "lr"), [("w8a8-int8", 1e-4), ("w4a16", 1e-3)])
@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_an_update_flips_as_many_times_more_codes_as_was_folded(small, optimizer, scheme, lr, factor) -> None:
    settings = {"lr": lr, "optimizer": optimizer}
    flipped = []
    for learner in (small.learner(scheme, **settings), folded(small, scheme, factor, **settings)):
        groups = small.rollout(learner, 12, 20)
        before = codes_of(small, learner)
        found = values(learner.update(groups, small.advantages(groups)))
        after = codes_of(small, learner)
        assert found["quant/codes_flipped"] > 0.0
        changed = sum(int((before[name] != after[name]).sum()) for name in before)
        flipped.append(changed / sum(codes.numel() for codes in before.values()))
    assert flipped[1] / flipped[0] == pytest.approx(factor, rel=0.1)


def test_every_scheme_is_looked_at() -> None:
    assert {name.split("-g")[0] for name in SCHEMES} - {"w12a12-int12"} == set(ALL)
