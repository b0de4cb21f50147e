"""Steps against formulas in float64, and state that survives files bit for bit."""

import json
import math
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from qarl.checkpoint import load_tensors, save_tensors
from qarl.errors import RunError
from qarl.optim import OPTIMIZERS, AdamW, Muon, NamedOptimizer, OptimizerConfig

SHAPES = {
    "model.embed_tokens.weight": (7, 4),
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.mlp.up_proj.weight": (6, 4),
    "model.norm.weight": (4,),
    "lm_head.weight": (7, 4),
}
UP, NORM, HEAD = "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"


def model(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in SHAPES.items()}


def train(weights: dict[str, Tensor], optimizer: NamedOptimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 + step)
        for weight in weights.values():
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.set_lr(1.0 / (step + 1))
        optimizer.step()
        optimizer.zero_grad()


def test_adamw_takes_the_step_of_its_formula() -> None:
    weights = model()
    weight, lr, decay = weights[HEAD], 0.01, 0.1
    expected = weight.detach().double()
    first, second = torch.zeros_like(expected), torch.zeros_like(expected)
    optimizer = AdamW(weight_decay=decay).build(weights.items(), lr)
    for step in (1, 2, 3):
        gradient = torch.full_like(weight, 0.3 * step)
        weight.grad = gradient
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient.double()
        second = 0.95 * second + 0.05 * gradient.double() ** 2
        expected = expected * (1 - lr * decay)
        expected = expected - lr * (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-6, atol=1e-7)


def test_decay_alone_moves_matrices_and_leaves_norms() -> None:
    weights = model()
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer = AdamW(weight_decay=0.5).build(weights.items(), lr=0.1)
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    torch.testing.assert_close(weights[UP].detach(), before[UP] * (1 - 0.1 * 0.5))
    for name in (NORM, "model.embed_tokens.weight"):
        assert torch.equal(weights[name], before[name])


def test_one_huge_gradient_after_a_calm_stretch_moves_a_weight_by_half_a_step_at_most() -> None:
    weight = torch.zeros(1, requires_grad=True)
    optimizer = AdamW().build([("lm_head.weight", weight)], lr=1.0)
    for step in range(400):
        weight.grad = torch.full((1,), 1e-8 * (-1) ** step)
        optimizer.step()
    before = weight.item()
    weight.grad = torch.full((1,), 1e3)
    optimizer.step()
    assert before - weight.item() == pytest.approx(0.1 / math.sqrt(0.05), rel=1e-3)


def test_muon_moves_a_projection_by_its_orthogonalized_gradient() -> None:
    # A gradient of one singular value s becomes one near 1; the step is lr * 0.2 * sqrt(max(6, 4)) times that.
    weights = model()
    before = weights[UP].detach().clone()
    optimizer = Muon().build(weights.items(), lr=0.01)
    left, right = torch.eye(6)[:, :1], torch.eye(4)[:1]
    weights[UP].grad = 5.0 * left @ right
    optimizer.step()
    step = (before - weights[UP].detach()) / (0.01 * 0.2 * math.sqrt(6))
    assert 0.5 < step[0, 0].item() < 1.5
    step[0, 0] = 0.0
    assert step.abs().max().item() < 1e-6


def test_muon_trains_everything_else_as_adamw_does() -> None:
    by_muon, by_adamw = model(), model()
    train(by_muon, Muon(adamw_lr_ratio=2.0).build(by_muon.items(), 0.01), range(3))
    train(by_adamw, AdamW().build(by_adamw.items(), 0.02), range(3))
    for name in (NORM, HEAD, "model.embed_tokens.weight"):
        assert torch.equal(by_muon[name], by_adamw[name])
    assert not torch.equal(by_muon[UP], by_adamw[UP])


@pytest.mark.parametrize("config", [AdamW(), Muon()])
def test_the_factor_scales_every_rate_and_zero_means_no_motion(config: AdamW | Muon) -> None:
    weights = model()
    optimizer = config.build(weights.items(), lr=0.5)
    optimizer.set_lr(0.5)
    optimizer.set_lr(0.25)
    assert optimizer.lr == 0.125
    optimizer.set_lr(0.0)
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert all(torch.equal(weights[name], start) for name, start in model().items())


def test_zero_grad_drops_gradients() -> None:
    weights = model()
    optimizer = Muon().build(weights.items(), 0.1)
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    optimizer.zero_grad()
    assert all(weight.grad is None for weight in weights.values())


@pytest.mark.parametrize("config", [AdamW(weight_decay=0.1), Muon(weight_decay=0.1)])
def test_a_run_restored_from_files_goes_on_bit_for_bit(config: AdamW | Muon, tmp_path: Path) -> None:
    unbroken = model()
    train(unbroken, config.build(unbroken.items(), 0.01), range(6))

    broken = model()
    optimizer = config.build(broken.items(), 0.01)
    train(broken, optimizer, range(3))
    tensors, scalars = optimizer.export_state()
    save_tensors(tmp_path / "optimizer.safetensors", tensors)
    (tmp_path / "optimizer.json").write_text(json.dumps(scalars))

    resumed = {name: weight.detach().clone().requires_grad_() for name, weight in broken.items()}
    fresh = config.build(reversed(resumed.items()), 0.01)
    fresh.import_state(
        load_tensors(tmp_path / "optimizer.safetensors"), json.loads((tmp_path / "optimizer.json").read_text())
    )
    assert fresh.lr == optimizer.lr
    train(resumed, fresh, range(3, 6))
    for name, weight in unbroken.items():
        assert torch.equal(resumed[name], weight), name


def test_state_before_the_first_step_restores_as_no_state() -> None:
    weights = model()
    tensors, scalars = AdamW().build(weights.items(), 0.01).export_state()
    assert tensors == {}
    restored = AdamW().build(weights.items(), 0.01)
    restored.import_state(tensors, scalars)
    assert restored.export_state()[0] == {}


def test_restored_state_is_a_copy() -> None:
    weights = model()
    optimizer = AdamW().build(weights.items(), 0.01)
    train(weights, optimizer, range(1))
    tensors, scalars = optimizer.export_state()
    other = AdamW().build(model().items(), 0.01)
    other.import_state(tensors, scalars)
    tensors[f"{UP}.exp_avg"].fill_(9.0)
    assert other.export_state()[0][f"{UP}.exp_avg"].abs().max().item() < 9.0


def trained_state() -> tuple[dict[str, Tensor], dict[str, object]]:
    weights = model()
    optimizer = AdamW().build(weights.items(), 0.01)
    train(weights, optimizer, range(1))
    tensors, scalars = optimizer.export_state()
    return tensors, json.loads(json.dumps(scalars))


def refusal(weights: dict[str, Tensor], kind: str = "adamw", drop: str = "", **changes: Tensor) -> str:
    tensors, scalars = trained_state()
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if name != drop}
    optimizer = OPTIMIZERS[kind]().build(weights.items(), 0.01)
    with pytest.raises(RunError) as caught:
        optimizer.import_state(tensors, scalars)  # type: ignore[arg-type]
    assert optimizer.export_state()[0] == {}, "a refused state must leave nothing behind"
    return str(caught.value)


def test_state_of_another_optimizer_is_refused() -> None:
    assert "written by 'adamw', but this run uses 'muon'" in refusal(model(), "muon")


def test_a_parameter_without_saved_state_is_named() -> None:
    assert "has nothing for extra.weight" in refusal(model() | {"extra.weight": torch.zeros(2, requires_grad=True)})


def test_saved_state_without_a_parameter_is_named() -> None:
    weights = {name: weight for name, weight in model().items() if name != NORM}
    assert f"the model lacks: {NORM}" in refusal(weights)


def test_another_shape_or_dtype_is_named_with_both() -> None:
    wider = model() | {NORM: torch.zeros(5, requires_grad=True)}
    assert f"{NORM} is torch.float32 [5], saved as torch.float32 [4]" in refusal(wider)
    shorter = model() | {NORM: torch.zeros(4, dtype=torch.bfloat16, requires_grad=True)}
    assert f"{NORM} is torch.bfloat16 [4], saved as torch.float32 [4]" in refusal(shorter)


def test_a_missing_or_misshapen_tensor_is_named() -> None:
    assert f"lacks tensors: {UP}.exp_avg_sq" in refusal(model(), drop=f"{UP}.exp_avg_sq")
    assert f"misshapen tensors: {UP}.exp_avg" in refusal(model(), **{f"{UP}.exp_avg": torch.zeros(3)})


def test_unreadable_scalars_are_refused() -> None:
    with pytest.raises(RunError, match="cannot be read"):
        AdamW().build(model().items(), 0.01).import_state({}, {"optimizer": "adamw"})


def test_the_account_shows_both_methods() -> None:
    account = Muon().build(model().items(), 0.01).describe()
    assert "projection muon  lr 0.01 decay 0: 2 tensors, 40 numbers" in account
    assert "embedding  adamw lr 0.01 decay 0: 1 tensors, 28 numbers" in account


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_the_table_and_the_union_name_the_same_choices(name: str) -> None:
    assert type(TypeAdapter(OptimizerConfig).validate_python({"type": name})) is OPTIMIZERS[name]


def test_lists_are_accepted_for_betas_and_bad_ones_refused() -> None:
    assert AdamW.model_validate({"betas": [0.8, 0.9]}).betas == (0.8, 0.9)
    with pytest.raises(ValidationError, match="betas"):
        AdamW(betas=(0.9, 1.0))
