"""The gradient against plain float64, what an update does and refuses, and that a saved learner goes on exactly."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qarl.errors import ConfigurationError, RunError
from qarl.learner.batch import pack, shares_of
from qarl.learner.learner import LocalLearner, codes_flipped, dither_seed, score
from qarl.metrics import values
from qarl.models.config import ModelConfig, rope_tables
from qarl.models.lora import LoraConfig, merged
from qarl.objectives import Grpo, Reinforce
from qarl.objectives.policy_loss import KlPenalty
from qarl.ops.kernels import kernels, using
from qarl.ops.operand import Operand, operand_of
from qarl.ops.reference import ReferenceKernels
from qarl.optim import Linear, Muon
from qarl.quant import SCHEMES
from qarl.quant.qtensor import QTensor
from qarl.quant.scheme import scheme_named
from qarl.records import Completion, Group, LossInputs
from qarl.roles import LossReport, Objective

LENGTHS = (3, 40, 7)


class RecordedGradients:
    """Stands in for the optimizer: keeps the gradients of every step and changes nothing."""

    lr = 0.0

    def __init__(self, learner: LocalLearner) -> None:
        self.parameters = learner.trained()
        self.steps: list[dict[str, Tensor]] = []

    def set_lr(self, factor: float) -> None:
        pass

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self) -> None:
        self.steps.append({name: p.grad.clone() for name, p in self.parameters.items() if p.grad is not None})


class Spy:
    """Stands in for the objective: keeps what it is given and passes it on."""

    def __init__(self, objective: Objective | None = None) -> None:
        self.objective = objective or Reinforce()
        self.needs_entropy, self.needs_reference = self.objective.needs_entropy, self.objective.needs_reference
        self.inputs: list[LossInputs] = []

    def __call__(self, inputs: LossInputs) -> LossReport:
        self.inputs.append(inputs)
        return self.objective(inputs)


def gradients(learner: LocalLearner, groups: list[Group], advantages: list[Tensor]) -> dict[str, Tensor]:
    """Of one update, unclipped."""
    recorded: Any = RecordedGradients(learner)
    learner.optimizer = recorded
    learner.update(groups, advantages)
    [step] = recorded.steps
    return dict(step)


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        error = (found[name].double() - expected[name].double()).norm() / expected[name].double().norm()
        assert error < tolerance, f"{name}: relative error {error:.1e}"


def masters(learner: LocalLearner) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in learner.decoder.named_parameters()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


UNCLIPPED = {"max_grad_norm": 1e9}


def plain_logits(config: ModelConfig, weights: Mapping[str, Tensor], token_ids: Tensor, sampleable: int) -> Tensor:
    """A Llama in the precision of `weights`, straight from its definition. [T, sampleable]."""

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + config.norm_eps) * weights[f"{name}.weight"]

    def heads(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"]).view(len(x), -1, config.head_dim).transpose(0, 1)

    def rotated(x: Tensor) -> Tensor:
        cosine, sine = (table.to(x.dtype) for table in rope_tables(config, x.shape[1]))
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    x = weights["model.embed_tokens.weight"][token_ids]
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    for layer in (f"model.layers.{index}" for index in range(config.num_layers)):
        normed = norm(x, f"{layer}.input_layernorm")
        q, k, v = (heads(normed, f"{layer}.self_attn.{part}_proj") for part in "qkv")
        k, v = (one.repeat_interleave(config.num_heads // config.num_kv_heads, 0) for one in (rotated(k), v))
        scores = (rotated(q) @ k.mT / config.head_dim**0.5).masked_fill(future, -math.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = x + F.linear(mixed, weights[f"{layer}.self_attn.o_proj.weight"])
        normed = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (F.linear(normed, weights[f"{layer}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, weights[f"{layer}.mlp.down_proj.weight"])
    return F.linear(norm(x, "model.norm"), weights["model.embed_tokens.weight"])[:, :sampleable]


def plain_distribution(small, weights: Mapping[str, Tensor], group: Group, completion: Completion) -> Tensor:
    """Tempered log-probabilities [T, V] at each token of a completion."""
    token_ids = torch.cat([torch.tensor(group.prompt.token_ids), completion.token_ids])
    logits = plain_logits(small.config, weights, token_ids, small.sampleable)[len(group.prompt.token_ids) - 1 : -1]
    return (logits / small.sampling.temperature).log_softmax(-1)


def plain_loss(
    small, weights: Mapping[str, Tensor], groups: list[Group], advantages: list[Tensor], entropy_coef: float
) -> tuple[Tensor, float]:
    """The loss of Reinforce over a batch by a plain model, with gradient, and the mean entropy."""
    loss, num_tokens, total_entropy = torch.zeros((), dtype=torch.float64), 0, 0.0
    for group, advantages_G in zip(groups, advantages, strict=True):
        for completion, advantage in zip(group.completions, advantages_G.tolist(), strict=True):
            log_p = plain_distribution(small, weights, group, completion)
            sampled = log_p.gather(-1, completion.token_ids[:, None])[:, 0]
            torch.testing.assert_close(completion.engine_logprobs.double(), sampled.detach(), rtol=0, atol=1e-5)
            entropy = -(log_p.exp() * log_p).sum(-1)
            total_entropy += float(entropy.detach().sum())
            loss = loss - (advantage * sampled + entropy_coef * entropy).sum()
            num_tokens += len(completion)
    return loss / num_tokens, total_entropy / num_tokens


@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_the_gradient_is_that_of_a_plain_float64_model(small, entropy_coef: float):
    learner = small.learner(objective=Reinforce(entropy_coef=entropy_coef), head_chunk_tokens=7, **UNCLIPPED)
    groups = small.rollout(learner, *LENGTHS)
    advantages = small.advantages(groups)

    weights = {name: master.double().requires_grad_() for name, master in masters(learner).items()}
    loss, entropy = plain_loss(small, weights, groups, advantages, entropy_coef)
    loss.backward()
    expected = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    recorded = learner.optimizer = RecordedGradients(learner)
    found = values(learner.update(groups, advantages))
    assert_close(recorded.steps[0], expected, 2e-5)
    assert found["objective/entropy"] == pytest.approx(entropy, rel=1e-5)
    assert found["objective/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)


@pytest.mark.parametrize(
    "targets", [("*",), ("*.q_proj", "*.v_proj"), ("*.1.mlp.down_proj",), ("*.0.mlp.down_proj",)], ids=" ".join
)
@pytest.mark.parametrize("recomputes", [True, False])
def test_the_gradient_of_adapters_is_that_of_a_plain_float64_model(small, targets, recomputes: bool):
    """Whatever the first layer that has one: nothing before it takes a gradient."""
    lora = LoraConfig(rank=4, alpha=6.0, targets=targets)
    learner = small.learner(lora=lora, activation_checkpointing=recomputes, **UNCLIPPED)
    with torch.no_grad():
        for tensor in learner.trained().values():
            tensor.add_(0.05 * torch.randn_like(tensor))
    learner._snapshot = learner._requantize()
    groups = small.rollout(learner, *LENGTHS)
    advantages = small.advantages(groups)

    adapters = {name: tensor.detach().double().requires_grad_() for name, tensor in learner.trained().items()}
    weights = {name: weight.double() for name, weight in small.weights().items()}
    plain_loss(small, merged(weights, adapters, 1.5), groups, advantages, 0.0)[0].backward()
    expected = {name: tensor.grad for name, tensor in adapters.items() if tensor.grad is not None}
    assert_close(gradients(learner, groups, advantages), expected, 2e-5)
    assert all(parameter.grad is None for parameter in learner.decoder.parameters())


@pytest.mark.parametrize(("scheme", "kv"), [("none", "fp32"), ("w8a8-int8", "int8"), ("w4a16", "int8")], ids=str)
@pytest.mark.parametrize("objective", [Reinforce(), Grpo()], ids=["token_mean", "sequence_mean"])
def test_neither_sharing_a_prompt_nor_the_micro_batch_changes_the_gradient(small, scheme, kv, objective):
    small = dataclasses.replace(small, kv=kv)

    def of(groups: list[Group], advantages: list[Tensor], **config: int) -> dict[str, Tensor]:
        return gradients(small.learner(scheme, objective, gradients="fp32", **UNCLIPPED, **config), groups, advantages)

    groups = small.rollout(small.learner(scheme), *LENGTHS, group_size=4)
    advantages = small.advantages(groups)
    shared = of(groups, advantages)
    alone = [Group(group.prompt, (completion,)) for group in groups for completion in group.completions]
    assert_close(of(alone, list(torch.cat(advantages)[:, None])), shared, 1e-5)
    for tokens in (1, 20, 60):
        assert_close(of(groups, advantages, micro_batch_tokens=tokens), shared, 1e-5)


@pytest.mark.parametrize("config", [{"activation_checkpointing": True}, {"head_chunk_tokens": 1}], ids=str)
def test_what_saves_memory_computes_the_same(small, config):
    groups = small.rollout(small.learner("w8a8-int8"), *LENGTHS)
    advantages = small.advantages(groups)
    fixed: dict[str, Any] = {"gradients": "fp32", **UNCLIPPED}
    plain, saving = (small.learner("w8a8-int8", **fixed, **options) for options in ({}, config))
    micro = pack(shares_of(groups, advantages))
    assert torch.equal(plain.logprobs(micro)[0], saving.logprobs(micro)[0])
    assert_close(gradients(saving, groups, advantages), gradients(plain, groups, advantages), 1e-6)


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w4a8-int8"])
def test_integer_gradients_are_those_of_fp32_to_a_thousandth(small, scheme):
    groups = small.rollout(small.learner(scheme), *LENGTHS)
    advantages = small.advantages(groups)
    exact, rounded = (
        gradients(small.learner(scheme, gradients=kind, **UNCLIPPED), groups, advantages) for kind in ("fp32", "auto")
    )
    assert any(not torch.equal(rounded[name], exact[name]) for name in exact) == (kernels().name == "cpu")
    for name, gradient in exact.items():
        assert (rounded[name] - gradient).norm() <= 1e-3 * gradient.norm(), name


def relative_error(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Of all gradients together."""
    errors = sum(float((found[name] - exact[name]).double().square().sum()) for name in exact)
    return math.sqrt(errors / sum(float(exact[name].double().square().sum()) for name in exact))


@pytest.mark.parametrize(
    ("scheme", "alignment"), [("none", "auto"), ("w4a16", "auto"), ("fp8", "auto"), ("w8a8-int8", "none")]
)
def test_gradients_of_8_bits_are_refused_where_they_would_be_ignored(small, scheme, alignment):
    with pytest.raises(ConfigurationError, match=r"learner\.gradients = 'int8' has no effect here"):
        small.learner(scheme, gradients="int8", alignment=alignment)


def test_gradients_of_8_bits_are_refused_where_only_the_head_is_quantized(small):
    with pytest.raises(ConfigurationError, match=r"learner\.gradients = 'int8' has no effect here"):
        small.learner("none", gradients="int8", rules={"lm_head": "w8a8-int8"})


def test_int8_gradients_are_those_of_fp32_in_the_mean_over_versions(small):
    """The noise of one is a few percent, and that of a mean smaller by the square root of how many there are."""
    groups = small.rollout(small.learner("w8a8-int8"), *LENGTHS)
    advantages = small.advantages(groups)
    exact = gradients(small.learner("w8a8-int8", gradients="fp32", **UNCLIPPED), groups, advantages)

    def of_version(version: int) -> dict[str, Tensor]:
        learner = small.learner("w8a8-int8", gradients="int8", **UNCLIPPED)
        learner.version = version
        return gradients(learner, [as_of(group, version) for group in groups], advantages)

    found = [of_version(version) for version in range(25)]
    if kernels().name == "cpu":
        assert 1e-3 < relative_error(found[0], exact) < 0.1
        assert 0.5 < relative_error(found[0], found[1]) / relative_error(found[0], exact) / math.sqrt(2) < 2
    mean = {name: torch.stack([gradient[name] for gradient in found]).mean(0) for name in exact}
    assert relative_error(mean, exact) < 0.3 * relative_error(found[0], exact) + 1e-6


def as_of(group: Group, version: int) -> Group:
    """The same completions, as if this version had sampled them."""
    sampled = (dataclasses.replace(c, versions=torch.full_like(c.versions, version)) for c in group.completions)
    return Group(group.prompt, tuple(sampled))


def test_every_projection_and_backward_pass_has_a_dither_of_its_own():
    places = itertools.product(range(3), range(3), range(3), ("a", "b"))
    seeds = {dither_seed(*place) for place in places}
    assert len(seeds) == 54
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_the_gradient_is_clipped_and_its_norm_before_that_reported(small):
    groups = small.rollout(small.learner(), *LENGTHS)
    advantages = small.advantages(groups)
    free = gradients(small.learner(**UNCLIPPED), groups, advantages)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in free.values()))
    learner = small.learner(max_grad_norm=norm / 4)
    learner.optimizer = RecordedGradients(learner)
    assert values(learner.update(groups, advantages))["optim/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert_close(learner.optimizer.steps[0], {name: gradient / 4 for name, gradient in free.items()}, 1e-5)


def test_the_objective_sees_counts_of_the_whole_optimizer_batch(small):
    spy = Spy()
    learner = small.learner(objective=spy, micro_batch_tokens=1)
    groups = small.rollout(learner, *LENGTHS)
    advantages = small.advantages(groups)
    advantages[1][2] = math.nan
    learner.update(groups, advantages)
    trained = [sample for share in shares_of(groups, advantages) for sample in share.samples]
    assert len(spy.inputs) == len(trained) == 8
    for inputs, sample in zip(spy.inputs, trained, strict=True):
        assert inputs.num_sequences == 8
        assert inputs.num_tokens == sum(len(sample.completion) for sample in trained)
        assert inputs.max_new_tokens == small.sampling.max_new_tokens
        assert torch.equal(inputs.tokens_BT, sample.completion.token_ids[None])
        assert torch.equal(inputs.engine_BT, sample.completion.engine_logprobs[None])
        assert inputs.advantages_B.tolist() == [sample.advantage]
        assert inputs.reference_BT is None


def test_a_nan_advantage_is_a_completion_that_was_never_there(small):
    groups = small.rollout(small.learner(), *LENGTHS)
    advantages = small.advantages(groups)
    advantages[0][1] = advantages[2][:] = math.nan
    fewer = [Group(groups[0].prompt, groups[0].completions[::2]), groups[1]]
    found = gradients(small.learner(**UNCLIPPED), groups, advantages)
    assert_equal(found, gradients(small.learner(**UNCLIPPED), fewer, [advantages[0][::2], advantages[1]]))


def test_a_batch_without_any_advantage_is_counted_told_of_and_changes_nothing(small, caplog):
    learner = small.learner("w8a8-int8")
    groups, before = small.rollout(learner, *LENGTHS), masters(learner)
    found = values(learner.update(groups, [torch.full((3,), math.nan)] * 3))
    assert found == {"quant/codes_flipped": 0.0, "optim/grad_norm": 0.0}
    assert "nothing was trained" in caplog.text
    assert learner.version == learner.publish().version == 1
    assert_equal(masters(learner), before)


@pytest.mark.parametrize("objective", [Reinforce(), Grpo()], ids=["token_mean", "sequence_mean"])
def test_skipping_equal_groups_does_not_change_the_gradient(small, objective):
    groups = small.rollout(small.learner(), *LENGTHS)
    advantages = small.advantages(groups)
    advantages[0][:] = advantages[2][:] = 0.0
    everything, less = Spy(objective), Spy(objective)
    all_of_them = small.learner(objective=everything, skip_equal_groups=False, **UNCLIPPED)
    expected = gradients(all_of_them, groups, advantages)
    found = gradients(small.learner(objective=less, **UNCLIPPED), groups, advantages)
    assert_close(found, expected, 1e-5)
    assert [sum(len(inputs.mask_BT) for inputs in spy.inputs) for spy in (everything, less)] == [9, 3]


def test_a_batch_of_equal_groups_only_is_not_skipped(small):
    spy = Spy()
    learner = small.learner(objective=spy)
    learner.update(small.rollout(learner, *LENGTHS), [torch.zeros(3)] * 3)
    assert sum(len(inputs.mask_BT) for inputs in spy.inputs) == 9


def test_equal_groups_are_computed_where_another_term_of_the_loss_needs_them(small):
    spy = Spy(Grpo(entropy_coef=0.1))
    learner = small.learner(objective=spy)
    advantages = small.advantages(groups := small.rollout(learner, *LENGTHS))
    advantages[0][:] = 0.0
    learner.update(groups, advantages)
    assert sum(len(inputs.mask_BT) for inputs in spy.inputs) == 9


def test_an_update_moves_weights_and_publishes_them_as_the_next_version(small):
    learner = small.learner("w8a8-int8", schedule=Linear())
    first, before = learner.publish(), masters(learner)
    groups = small.rollout(learner, *LENGTHS)
    found = values(learner.update(groups, small.advantages(groups)))
    second = learner.publish()
    assert (first.version, second.version, learner.version) == (0, 1, 1)
    assert first.checksum != second.checksum
    assert [name for name, master in masters(learner).items() if torch.equal(master, before[name])] == []
    assert 0.0 < found["quant/codes_flipped"] < 1.0
    assert found["optim/lr"] == 3e-3
    groups = small.rollout(learner, *LENGTHS)
    assert values(learner.update(groups, small.advantages(groups)))["optim/lr"] == pytest.approx(3e-3 * 0.9)


def test_an_update_makes_rewarded_tokens_likelier(small):
    learner = small.learner("w8a8-int8", lr=1e-4)
    groups = small.rollout(learner, *LENGTHS)
    advantages = [torch.tensor([1.0, -1.0, 0.0])] * 3
    micro = pack(shares_of(groups, advantages))
    before = learner.logprobs(micro)[0].detach()
    learner.update(groups, advantages)
    gain = micro.frame(learner.logprobs(micro)[0].detach() - before).sum(-1).view(3, 3).sum(0)
    assert gain[0] > 0 > gain[1]


def test_aligned_ratios_of_the_first_update_are_exactly_1_and_those_of_the_second_are_not(small):
    spy = Spy(Grpo())
    learner = small.learner("w8a8-int8", spy, updates_per_batch=2)
    groups = small.rollout(learner, 3, 40, 7, 5)
    found = values(learner.update(groups, small.advantages(groups)))
    first, second = spy.inputs
    assert [inputs.num_sequences for inputs in spy.inputs] == [6, 6]
    for inputs in spy.inputs:
        assert torch.equal(inputs.old_BT, inputs.engine_BT)
    assert torch.equal(first.new_BT, first.old_BT)
    assert not torch.equal(second.new_BT, second.old_BT)
    # Tokens that later weights score are no mismatch of engine and learner.
    assert found["mismatch/bit_equal"] == 1.0
    assert found["mismatch/max_abs"] == 0.0
    assert found["objective/ratio_max"] > 1.0


def test_the_second_update_of_a_batch_multiplies_what_the_first_one_left(small):
    spy = Spy()
    twice, once = small.learner("w8a8-int8", spy, updates_per_batch=2), small.learner("w8a8-int8")
    groups = small.rollout(twice, 3, 40, 7, 5)
    advantages = small.advantages(groups)
    twice.update(groups, advantages)
    once.update(groups[:2], advantages[:2])
    micro = pack(shares_of(groups[2:], advantages[2:]))
    assert torch.equal(spy.inputs[1].new_BT, micro.frame(once.logprobs(micro)[0]))


def test_where_kernels_are_not_exact_old_logprobs_are_the_learners(small):
    """Were they the engine's, the ratio would hold the mismatch, and clip bands would cut tokens that never moved."""
    spy = Spy(Grpo())
    with using(ReferenceKernels()):
        learner = small.learner("none", spy)
        groups = [
            dataclasses.replace(
                group,
                completions=tuple(
                    dataclasses.replace(one, engine_logprobs=one.engine_logprobs - 0.25) for one in group.completions
                ),
            )
            for group in small.rollout(learner, *LENGTHS)
        ]
        found = values(learner.update(groups, small.advantages(groups)))
    [inputs] = spy.inputs
    assert torch.equal(inputs.old_BT, inputs.new_BT)
    assert found["objective/ratio_max"] == 1.0
    assert found["mismatch/mean_abs"] == pytest.approx(0.25, abs=1e-3)


def test_the_loss_of_several_updates_is_reported_as_their_mean(small):
    # Both halves of the batch are the same, and at this rate the first update leaves the second what it was.
    twice, once = small.learner("none", lr=1e-9, updates_per_batch=2), small.learner("none", lr=1e-9)
    groups = small.rollout(twice, 3) * 2
    advantages = [torch.tensor([1.0, 2.0, 3.0])] * 2
    found, expected = (values(one.update(groups, advantages)) for one in (twice, once))
    assert expected["objective/loss"] != 0.0
    assert found["objective/loss"] == pytest.approx(expected["objective/loss"], rel=1e-3)


@pytest.mark.parametrize("updates", [1, 2])
def test_unaligned_old_logprobs_are_the_learners_and_the_mismatch_shows(small, updates: int):
    spy = Spy(Grpo())
    learner = small.learner("w8a8-int8", spy, alignment="none", updates_per_batch=updates)
    groups = small.rollout(learner, 3, 40, 7, 5)
    shares = shares_of(groups, small.advantages(groups))
    full_precision = small.decoder()
    full_precision.serve_masters()
    expected = [
        score(full_precision, pack(part), small.sampling.temperature, learner.config)[0].detach()
        for part in ([shares] if updates == 1 else [shares[:2], shares[2:]])
    ]
    found = values(learner.update(groups, small.advantages(groups)))
    for inputs, scored in zip(spy.inputs, expected, strict=True):
        assert torch.equal(inputs.old_BT[inputs.mask_BT], scored)
        assert not torch.equal(inputs.old_BT, inputs.engine_BT)
    assert torch.equal(spy.inputs[0].new_BT, spy.inputs[0].old_BT)
    engine = torch.cat([c.engine_logprobs for g in groups for c in g.completions])
    assert found["mismatch/max_abs"] == pytest.approx(float((torch.cat(expected) - engine).abs().max()))
    assert found["mismatch/max_abs"] > 1e-4
    assert found["mismatch/bit_equal"] < 0.5


def test_unaligned_without_quantization_is_no_mismatch(small):
    learner = small.learner("none", alignment="none")
    groups = small.rollout(learner, *LENGTHS)
    assert values(learner.update(groups, small.advantages(groups)))["mismatch/bit_equal"] == 1.0


@pytest.mark.parametrize("broken", [math.inf, -math.inf])
def test_an_update_without_a_finite_gradient_is_skipped_and_counted(small, broken: float):
    learner = small.learner("w8a8-int8")
    groups, before = small.rollout(learner, *LENGTHS), masters(learner)
    advantages = small.advantages(groups)
    advantages[1][0] = broken
    found = values(learner.update(groups, advantages))
    assert found["optim/skipped"] == 1.0
    assert math.isnan(found["optim/grad_norm"])
    assert_equal(masters(learner), before)
    assert (learner.version, learner.skipped_in_a_row) == (1, 1)
    groups = small.rollout(learner, *LENGTHS)
    found = values(learner.update(groups, small.advantages(groups)))
    assert found["optim/skipped"] == 0.0
    assert learner.skipped_in_a_row == 0
    assert all(bool(master.isfinite().all()) for master in masters(learner).values())


def test_the_run_stops_after_too_many_skipped_updates_in_a_row(small):
    learner = small.learner(max_skipped_updates=1)
    for _ in range(2):
        groups = small.rollout(learner, *LENGTHS)
        broken = [torch.full((3,), math.inf)] * 3
        if learner.version == 0:
            learner.update(groups, broken)
        else:
            with pytest.raises(RunError, match=r"2 updates in a row .*learner\.max_skipped_updates = 1"):
                learner.update(groups, broken)
    assert_equal(masters(learner), masters(small.learner()))


def test_tokens_of_another_version_are_refused(small):
    learner = small.learner()
    groups = small.rollout(learner, *LENGTHS)
    learner.update(groups, small.advantages(groups))
    with pytest.raises(RunError, match=r"prompt small/0: tokens sampled by version 0, the learner has version 1"):
        learner.update(groups, small.advantages(groups))
    fresh = small.rollout(learner, *LENGTHS)
    mixed = fresh[1].completions[0]
    mixed = dataclasses.replace(mixed, versions=torch.cat([torch.tensor([0]), mixed.versions[1:]]))
    fresh[1] = Group(fresh[1].prompt, (mixed, *fresh[1].completions[1:]))
    with pytest.raises(RunError, match=r"prompt small/1: tokens sampled by version 0"):
        learner.update(fresh, small.advantages(fresh))


def test_flipped_codes_are_counted_over_all_modules():
    def operands(integers: list[int], floats: list[float], nibbles: list[int]) -> dict[str, Operand]:
        one = torch.ones(1, 1)
        parts: dict[str, QTensor | Tensor] = {
            "a": QTensor(torch.tensor([integers], dtype=torch.int8), one, scheme_named("w8a8-int8")),
            "b": QTensor(torch.tensor([floats]).to(torch.float8_e4m3fn), one, scheme_named("fp8")),
            "c": QTensor(torch.tensor([nibbles * 32], dtype=torch.int8), one, scheme_named("w4a16")),
            "d": torch.tensor([[float(sum(integers))]]),
        }
        return {name: operand_of([part], [None]) for name, part in parts.items()}

    before = operands([1, 2, 3, 4], [1.0, 2.0, 4.0, 8.0], [1, -7])
    after = operands([1, 3, 3, -4], [1.0, 2.0, 4.0, -8.0], [1, 7])
    assert codes_flipped(before, after).value() == (2 + 1 + 32) / (4 + 4 + 64)
    assert codes_flipped(before, before).value() == 0.0
    assert math.isnan(codes_flipped({}, {}).value())


def test_a_step_far_below_the_grid_flips_no_code(small):
    learner = small.learner("w8a8-int8", lr=1e-12)
    groups = small.rollout(learner, *LENGTHS)
    assert values(learner.update(groups, small.advantages(groups)))["quant/codes_flipped"] == 0.0


@pytest.mark.parametrize("alignment", ["auto", "none"])
@pytest.mark.parametrize("scheme", ["none", "w8a8-int8"])
def test_the_reference_is_the_first_policy_and_stays_it(small, scheme: str, alignment: str):
    spy = Spy(Grpo(kl=KlPenalty(type="k3", coef=0.1)))
    spy.needs_reference = True
    learner = small.learner(scheme, spy, alignment)
    divergences = []
    for _ in range(3):
        groups = small.rollout(learner, *LENGTHS)
        divergences.append(values(learner.update(groups, small.advantages(groups)))["objective/kl"])
    assert divergences[0] == 0.0
    assert min(divergences[1:]) > 0.0
    assert torch.equal(spy.inputs[0].reference_BT, spy.inputs[0].new_BT)
    # What the untrained policy says of the last batch.
    micro = pack(shares_of(groups, small.advantages(groups)))
    untrained = small.learner(scheme, alignment=alignment)
    scored = untrained.logprobs(micro)[0].detach()
    assert torch.equal(micro.frame(scored), spy.inputs[-1].reference_BT)


def steps(small, learner: LocalLearner, count: int) -> list[dict[str, float]]:
    found = []
    for _ in range(count):
        groups = small.rollout(learner, *LENGTHS)
        found.append(values(learner.update(groups, small.advantages(groups, seed=learner.version))))
    return found


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"optimizer": Muon()},
        {"updates_per_batch": 3, "schedule": Linear(warmup_steps=3)},
        {"updates_per_batch": 2, "micro_batch_tokens": 60, "gradients": "int8"},
    ],
    ids=str,
)
def test_a_saved_and_restored_learner_goes_on_as_the_unbroken_one(small, tmp_path, config):
    def fresh() -> LocalLearner:
        return small.learner("w8a8-int8", Grpo(kl=KlPenalty(type="k3", coef=0.1)), **config)

    unbroken = fresh()
    steps(small, unbroken, 2)
    unbroken.skipped_in_a_row = 1
    unbroken.save(tmp_path)
    resumed = fresh()
    resumed.restore(tmp_path)
    assert (resumed.version, resumed.skipped_in_a_row) == (2, 1)
    assert resumed.publish().version == 2
    assert resumed.publish().checksum == unbroken.publish().checksum
    assert steps(small, resumed, 2) == steps(small, unbroken, 2)
    assert_equal(masters(resumed), masters(unbroken))
    assert resumed.publish().checksum == unbroken.publish().checksum


def test_a_learner_can_be_saved_before_its_first_update(small, tmp_path):
    learner = small.learner()
    learner.save(tmp_path)
    other = small.learner(seed=1)
    other.restore(tmp_path)
    assert_equal(masters(other), masters(learner))
    assert steps(small, other, 1) == steps(small, learner, 1)


@pytest.mark.parametrize(
    "change", [{"hidden_size": 256}, {"num_layers": 1}, {"tie_embeddings": False}, {"norm_eps": 1e-2}], ids=str
)
def test_another_models_state_is_refused_before_anything_changes(small, tmp_path, change):
    small.learner().save(tmp_path)
    other = dataclasses.replace(small, config=dataclasses.replace(small.config, **change)).learner()
    before = masters(other)
    (name,) = change
    with pytest.raises(RunError, match=f"trained with another model configuration: now {name} ="):
        other.restore(tmp_path)
    assert_equal(masters(other), before)
    assert other.version == 0


def test_another_optimizers_state_is_refused(small, tmp_path):
    small.learner().save(tmp_path)
    with pytest.raises(RunError, match="written by 'adamw', but this run uses 'muon'"):
        small.learner(optimizer=Muon()).restore(tmp_path)


def test_another_kl_reference_than_the_runs_own_is_refused(small, tmp_path):
    held = Grpo(kl=KlPenalty(type="k3", coef=0.1))
    small.learner("w8a8-int8", held).save(tmp_path)
    with pytest.raises(RunError, match="would be another KL reference"):
        small.learner("w8a8-int8", held, seed=1).restore(tmp_path)
    small.learner("w8a8-int8", held).restore(tmp_path)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_of_zeros_is_trained_like_any_other(small, scheme):
    learner = small.learner(scheme)
    with torch.no_grad():
        for name, parameter in learner.decoder.named_parameters():
            if name.startswith("model.layers.0."):
                parameter.zero_()
    learner._snapshot = learner._requantize()
    groups = small.rollout(learner, *LENGTHS)
    found = values(learner.update(groups, small.advantages(groups)))
    assert (found["mismatch/bit_equal"], found["optim/skipped"]) == (1.0, 0.0)
    assert all(bool(weight.isfinite().all()) for weight in masters(learner).values())


def test_a_stop_for_skipped_updates_leaves_the_count_of_the_step_before(small, monkeypatch):
    learner = small.learner(max_skipped_updates=1)
    learner.skipped_in_a_row = 1
    monkeypatch.setattr("qarl.learner.learner.clip_grad_norm", lambda *_: math.inf)
    groups = small.rollout(learner, *LENGTHS)
    with pytest.raises(RunError, match="2 updates in a row"):
        learner.update(groups, small.advantages(groups))
    assert (learner.skipped_in_a_row, learner.optimizer_steps) == (1, 0)


def test_a_gradient_has_the_same_bits_every_time_whatever_the_threads(small):
    """First tokens of a group are predicted by one row, whose gradient is a sum of many: their order must not vary."""
    torch.set_num_threads(4)
    learner = small.learner("w8a8-int8", Grpo())
    groups = small.rollout(learner, 5, 9, group_size=300)
    advantages = small.advantages(groups)
    first = gradients(small.learner("w8a8-int8", Grpo()), groups, advantages)
    for _ in range(8):
        assert_equal(gradients(small.learner("w8a8-int8", Grpo()), groups, advantages), first)
