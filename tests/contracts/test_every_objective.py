"""What holds for every row of the objectives' table, with every correction and aggregation."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from qarl import metrics
from qarl.objectives import OBJECTIVES, ObjectiveConfig, PolicyObjective
from qarl.objectives.corrections import CORRECTIONS
from qarl.objectives.policy_loss import CorrectedObjective
from qarl.objectives.terms import Aggregation, aggregate
from qarl.records import LossInputs

KL = {"type": "k3", "coef": 0.1}
IGNORES_NEGATIVE = {"positive_only"}
"""Objectives that by definition have no gradient where A < 0."""
NO_POTENTIAL = {"cispo"}
"""Objectives whose gradient is not that of their value: the ratio in it is a constant weight. Their own
tests have the table of gradients."""


def configurations() -> list[tuple[str, dict[str, object]]]:
    """Every objective with every aggregation, and every correction where it takes one; KL and entropy in each."""
    found: list[tuple[str, dict[str, object]]] = []
    for name, choice in OBJECTIVES.items():
        terms: dict[str, object] = {"kl": KL, "entropy_coef": 0.01}
        found += [(f"{name}-{how}", {"type": name, "aggregation": how, **terms}) for how in get_args(Aggregation)]
        if issubclass(choice, CorrectedObjective):
            found += [(f"{name}-{kind}", {"type": name, "correction": {"type": kind}, **terms}) for kind in CORRECTIONS]
    salvage = {"salvage_probability": 0.05, "salvage_ngram": 1}
    return [*found, ("tbpo-salvage", {"type": "tbpo", "kl": KL, "entropy_coef": 0.01, **salvage})]


every_configuration = pytest.mark.parametrize(
    "objective",
    [pytest.param(table, id=name) for name, table in configurations()],
    indirect=True,
)
every_objective = pytest.mark.parametrize("name", OBJECTIVES)


@pytest.fixture
def objective(request: pytest.FixtureRequest) -> PolicyObjective:
    built: PolicyObjective = TypeAdapter(ObjectiveConfig).validate_python(request.param)
    return built


def random_batch(spread: float, sequences: int = 8, length: int = 6) -> LossInputs:
    """Completions of different lengths, one of them empty; log-ratios are of the size of `spread`."""
    old_BT = -3.0 * torch.rand(sequences, length, dtype=torch.float64)
    lengths_B1 = torch.tensor([6, 1, 4, 0, 6, 3, 2, 5])[:sequences, None]
    mask_BT = torch.arange(length) < lengths_B1
    return LossInputs(
        new_BT=(old_BT + spread * torch.randn_like(old_BT)).requires_grad_(True),
        old_BT=old_BT,
        engine_BT=old_BT + spread * torch.randn_like(old_BT),
        advantages_B=torch.tensor([1.0, -1.0, 0.5, -2.0, -0.3, 0.0, 2.0, -1.5], dtype=torch.float64)[:sequences],
        mask_BT=mask_BT,
        num_sequences=sequences,
        num_tokens=int(mask_BT.sum()),
        max_new_tokens=16,
        entropy_BT=torch.rand_like(old_BT),
        reference_BT=old_BT + spread * torch.randn_like(old_BT),
        tokens_BT=torch.randint(4, old_BT.shape),
    )


def each_tensor(inputs: LossInputs, change: Callable[[Tensor], Tensor]) -> LossInputs:
    """The inputs with `change` applied to every tensor, the rest as it is."""
    parts = {part.name: getattr(inputs, part.name) for part in dataclasses.fields(inputs)}
    return dataclasses.replace(
        inputs, **{name: change(part) for name, part in parts.items() if isinstance(part, Tensor)}
    )


def row_range(inputs: LossInputs, start: int, stop: int) -> LossInputs:
    return each_tensor(inputs, lambda part: part[start:stop])


def gradient(objective: PolicyObjective, inputs: LossInputs) -> Tensor:
    return torch.autograd.grad(objective(inputs).loss, inputs.new_BT)[0]


@pytest.mark.parametrize("spread", [1e-4, 0.5])
@every_configuration
def test_masked_tokens_get_no_gradient_and_do_not_enter(objective, spread):
    inputs = random_batch(spread)

    def with_garbage(part: Tensor) -> Tensor:
        garbage = torch.full_like(part, 7) if part.dtype == torch.int64 else torch.full_like(part, -1e30)
        return torch.where(inputs.mask_BT, part, garbage) if part.shape == inputs.mask_BT.shape else part

    spoiled = dataclasses.replace(each_tensor(inputs, with_garbage), mask_BT=inputs.mask_BT)
    assert objective(spoiled).loss.item() == objective(inputs).loss.item()
    assert gradient(objective, spoiled)[~inputs.mask_BT].abs().max() == 0.0
    assert torch.equal(gradient(objective, spoiled), gradient(objective, inputs))


@every_objective
@pytest.mark.parametrize("how", get_args(Aggregation))
def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(name, how):
    inputs = random_batch(0.0)
    plain = aggregate(-inputs.advantages_B[:, None] * inputs.new_BT, inputs, how)
    (expected,) = torch.autograd.grad(plain, inputs.new_BT)
    if name in IGNORES_NEGATIVE:
        expected = torch.where(inputs.advantages_B[:, None] > 0, expected, 0.0)
    assert expected.abs().max() > 0.0
    torch.testing.assert_close(gradient(OBJECTIVES[name](aggregation=how), inputs), expected)


@pytest.mark.parametrize("spread", [1e-4, 0.5])
@every_configuration
def test_splitting_into_micro_batches_changes_nothing(objective, spread):
    inputs = random_batch(spread)
    whole = objective(inputs)
    (expected,) = torch.autograd.grad(whole.loss, inputs.new_BT, retain_graph=True)
    for rows in (1, 2, 4):
        micro_batches = [row_range(inputs, start, start + rows) for start in range(0, 8, rows)]
        reports = [objective(micro_batch) for micro_batch in micro_batches]
        loss = torch.stack([report.loss for report in reports]).sum()
        torch.testing.assert_close(loss, whole.loss)
        torch.testing.assert_close(torch.autograd.grad(loss, inputs.new_BT)[0], expected)
        merged = metrics.values(metrics.merge(report.metrics for report in reports))
        assert merged == pytest.approx(metrics.values(whole.metrics))


@every_configuration
def test_padding_changes_nothing(objective):
    inputs = random_batch(0.01)

    def padded(part: Tensor) -> Tensor:
        return part if part.dim() == 1 else torch.nn.functional.pad(part, (2, 3), value=0)

    wide = each_tensor(inputs, padded)
    torch.testing.assert_close(objective(wide).loss, objective(inputs).loss)
    torch.testing.assert_close(gradient(objective, wide)[:, 2:-3], gradient(objective, inputs))


@every_configuration
def test_log_ratios_of_a_hundred_give_finite_losses_and_gradients(objective):
    inputs = each_tensor(random_batch(0.1), lambda part: part.float() if part.is_floating_point() else part)
    for new_shift, engine_shift in itertools.product((100.0, -100.0), repeat=2):
        extreme = dataclasses.replace(
            inputs, new_BT=inputs.new_BT + new_shift, engine_BT=inputs.engine_BT + engine_shift
        )
        report = objective(extreme)
        assert report.loss.isfinite()
        assert torch.autograd.grad(report.loss, extreme.new_BT)[0].isfinite().all()
        assert all(math.isfinite(value) for value in metrics.values(report.metrics).values())


@every_configuration
def test_sequences_without_trained_tokens_give_zero_and_not_nan(objective):
    inputs = random_batch(0.1)
    empty = dataclasses.replace(inputs, mask_BT=torch.zeros_like(inputs.mask_BT), num_tokens=0)
    assert objective(empty).loss.item() == 0.0
    assert gradient(objective, empty).abs().max() == 0.0


@every_objective
@pytest.mark.parametrize("spread", [1e-4, 0.5])
def test_zero_advantages_give_no_gradient(name, spread):
    inputs = dataclasses.replace(random_batch(spread), advantages_B=torch.zeros(8, dtype=torch.float64))
    assert gradient(OBJECTIVES[name](), inputs).abs().max() == 0.0


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in NO_POTENTIAL])
@pytest.mark.parametrize("spread", [1e-4, 0.3])
def test_the_gradient_agrees_with_finite_differences(name, spread):
    objective = OBJECTIVES[name].model_validate({"kl": KL, "entropy_coef": 0.01})
    base = random_batch(spread, sequences=3)
    logits_BTV = torch.randn(3, 6, 4, dtype=torch.float64)
    logprobs_BT = logits_BTV.log_softmax(-1)[..., 0]
    shift_BT = base.new_BT.detach() - base.old_BT

    def loss_at(logits: Tensor) -> Tensor:
        """Token 0 is the one drawn; old, engine and reference stay where they were before the step."""
        distribution = logits.log_softmax(-1)
        moved = dataclasses.replace(
            base,
            new_BT=distribution[..., 0],
            old_BT=logprobs_BT - shift_BT,
            engine_BT=logprobs_BT - shift_BT + base.engine_BT - base.old_BT,
            reference_BT=logprobs_BT - 2 * shift_BT,
            entropy_BT=-(distribution.exp() * distribution).sum(-1),
        )
        return objective(moved).loss

    logits_BTV.requires_grad_(True)
    (analytic,) = torch.autograd.grad(loss_at(logits_BTV), logits_BTV)
    step = 1e-6
    for _ in range(4):
        direction = torch.randn_like(logits_BTV)
        with torch.no_grad():
            rise = loss_at(logits_BTV + step * direction) - loss_at(logits_BTV - step * direction)
        torch.testing.assert_close((analytic * direction).sum(), rise / (2 * step), rtol=1e-6, atol=1e-8)
    assert analytic.abs().max() > 0.0


@every_objective
def test_the_usual_metrics_are_there_and_named_by_room(name):
    report = OBJECTIVES[name]()(random_batch(0.01))
    assert {"objective/loss", "objective/ratio_max", "objective/ratio_mean", "objective/entropy"} <= set(report.metrics)
    assert all(key.split("/")[0] in {"objective", "correction", "tbpo"} for key in report.metrics)
    assert report.metrics["objective/loss"].value() == pytest.approx(report.loss.item())


@every_objective
def test_the_type_in_a_recipe_chooses_the_row_and_every_field_is_described(name):
    chosen = TypeAdapter(ObjectiveConfig).validate_python({"type": name})
    assert type(chosen) is OBJECTIVES[name]
    assert not chosen.needs_entropy
    assert not chosen.needs_reference
    fields = type(chosen).model_fields
    assert [key for key, field in fields.items() if key != "type" and not field.description] == []
