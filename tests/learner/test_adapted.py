"""Adapters on a frozen base: it stays as it is and costs no gradient, and the run goes on exactly."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qarl.errors import RunError
from qarl.learner.batch import pack, shares_of
from qarl.learner.learner import LocalLearner
from qarl.metrics import values
from qarl.models.lora import LoraConfig
from qarl.objectives import Grpo
from qarl.objectives.policy_loss import KlPenalty
from qarl.ops.kernels import kernels
from qarl.optim import Muon
from qarl.quant import SCHEMES

LENGTHS = (3, 40, 7)
LORA = LoraConfig(rank=4, alpha=6.0)


def trained(small, learner: LocalLearner, updates: int = 1) -> LocalLearner:
    for _ in range(updates):
        groups = small.rollout(learner, *LENGTHS)
        learner.update(groups, small.advantages(groups))
    return learner


def logprobs(small, learner: LocalLearner, groups: list[Any]) -> torch.Tensor:
    return learner.logprobs(pack(shares_of(groups, small.advantages(groups))))[0].detach()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_before_the_first_update_the_bits_are_those_of_the_base(small, scheme: str):
    plain, adapted = small.learner(scheme), small.learner(scheme, lora=LORA)
    found, expected = (small.rollout(learner, *LENGTHS) for learner in (adapted, plain))
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            assert torch.equal(a.token_ids, b.token_ids)
            if kernels().exact_matmul:
                assert torch.equal(a.engine_logprobs, b.engine_logprobs)


@pytest.mark.parametrize("scheme", ["none", "w8a8-int8", "w4a16"])
@pytest.mark.parametrize("optimizer", [{}, {"optimizer": Muon()}], ids=["adamw", "muon"])
def test_updates_change_adapters_alone_and_publish_them_alone(small, scheme: str, optimizer):
    learner = small.learner(scheme, lora=LORA, **optimizer)
    before = {name: tensor.detach().clone() for name, tensor in learner.trained().items()}
    first = learner.publish()
    groups = small.rollout(learner, *LENGTHS)
    found = values(learner.update(groups, small.advantages(groups)))
    assert found["optim/grad_norm"] > 0 and "quant/codes_flipped" not in found
    trained(small, learner)  # while B is zero A has no gradient
    assert all(not torch.equal(tensor, before[name]) for name, tensor in learner.trained().items())
    snapshot = learner.publish()
    assert snapshot.lora is not None and first.lora is not None
    assert snapshot.lora.base is first.lora.base and snapshot.version == 2
    assert snapshot.tensors.keys() == learner.trained().keys()
    carried = sum(tensor.nbytes for tensor in snapshot.tensors.values())
    widths = 2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 128)  # K + N of q and o, k and v, gate, up and down
    assert carried == 4 * LORA.rank * widths * small.config.num_layers


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w4a16"])
def test_of_a_frozen_base_neither_masters_nor_gradients_nor_optimizer_state_are_held(small, scheme: str):
    learner = trained(small, small.learner(scheme, lora=LORA))
    for projection in learner.decoder.projections():
        assert all(linear.weight.is_meta for linear in projection.linears)
    assert all(parameter.grad is None for parameter in learner.decoder.parameters())
    state, _ = learner.optimizer.export_state()
    assert {name.rpartition(".")[0] for name in state} == learner.trained().keys()


def test_the_clipped_norm_is_that_of_the_adapters(small):
    learner = small.learner(lora=LORA, max_grad_norm=1e-12)
    groups = small.rollout(learner, *LENGTHS)
    learner.update(groups, small.advantages(groups))
    moments = learner.optimizer.export_state()[0]
    largest = max(float(moments[name].abs().max()) for name in moments if name.endswith("exp_avg"))
    assert 0 < largest <= 1e-12


@pytest.mark.parametrize("alignment", ["auto", "none"])
def test_the_reference_of_a_kl_penalty_is_the_base_without_adapters(small, alignment):
    objective = Grpo(kl=KlPenalty(coef=0.1))
    learner = small.learner("w8a8-int8", objective, alignment=alignment, lora=LORA)
    groups = small.rollout(learner, *LENGTHS)
    before = logprobs(small, learner, groups)
    trained(small, learner, 2)
    micro = pack(shares_of(groups, small.advantages(groups)))
    reference = learner._reference_logprobs(micro)
    assert reference is not None
    assert torch.equal(reference[micro.mask_BL], before)
    assert not torch.equal(logprobs(small, learner, groups), before)
    assert learner._reference is not None
    shared = learner._reference.model.embed_tokens.weight.data_ptr()
    assert shared == learner.decoder.model.embed_tokens.weight.data_ptr()


def test_unaligned_the_learner_multiplies_the_masters_and_the_engine_the_codes(small):
    learner = small.learner("w8a8-int8", alignment="none", lora=LORA)
    plain = small.learner("none")
    groups = small.rollout(learner, *LENGTHS)
    assert torch.equal(logprobs(small, learner, groups), logprobs(small, plain, groups))
    assert values(learner.update(groups, small.advantages(groups)))["mismatch/max_abs"] > 0


@pytest.mark.parametrize("scheme", ["none", "w8a8-int8"])
@pytest.mark.parametrize("optimizer", [{}, {"optimizer": Muon()}], ids=["adamw", "muon"])
def test_a_restored_learner_goes_on_as_the_unbroken_one(small, tmp_path: Path, scheme: str, optimizer):
    unbroken = trained(small, small.learner(scheme, lora=LORA, **optimizer), 2)
    unbroken.save(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "adapter_config.json", "adapter_model.safetensors", "learner.json", "optimizer.safetensors"
    ]  # fmt: skip
    restored = small.learner(scheme, lora=LORA, **optimizer)
    restored.restore(tmp_path)
    assert restored.publish().checksum == unbroken.publish().checksum
    assert (restored.version, restored.publish().version) == (2, 2)
    for learner in (unbroken, restored):
        trained(small, learner)
    assert restored.publish().checksum == unbroken.publish().checksum
    theirs, ours = (learner.optimizer.export_state()[0] for learner in (unbroken, restored))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_changed_base_is_refused_and_so_are_other_adapters(small, tmp_path: Path):
    trained(small, small.learner("w8a8-int8", lora=LORA)).save(tmp_path)
    with pytest.raises(RunError, match="would be another base of the adapters; put the old ones back"):
        small.learner("w8a8-int8", lora=LORA, seed=1).restore(tmp_path)
    for other in ({"rank": 3}, {"alpha": 5.0}, {"targets": ("*.q_proj",)}):
        learner = small.learner("w8a8-int8", lora=LORA.model_copy(update=other))
        with pytest.raises(RunError, match=r"adapters of other targets, rank or alpha \(rank 4, alpha 6\)"):
            learner.restore(tmp_path)


def test_another_model_configuration_is_refused(small, tmp_path: Path):
    trained(small, small.learner(lora=LORA)).save(tmp_path)
    other = dataclasses.replace(small, config=dataclasses.replace(small.config, norm_eps=0.5))
    with pytest.raises(RunError, match=r"another model configuration: now norm_eps = 0\.5"):
        other.learner(lora=LORA).restore(tmp_path)


def test_the_identity_of_a_base_does_not_depend_on_the_scheme(small, tmp_path: Path):
    learner = trained(small, small.learner("w8a8-int8", lora=LORA))
    learner.save(tmp_path)
    other = small.learner("w4a16", lora=LORA)
    other.restore(tmp_path)
    assert all(torch.equal(other.trained()[name], tensor) for name, tensor in learner.trained().items())
    assert len(json.loads((tmp_path / "learner.json").read_text())["started_with"]) == 64
