"""How gradients change weights: parameter groups, optimizers, schedules, clipping."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from qarl.optim.clipping import clip_grad_norm
from qarl.optim.groups import ParameterGroup, Treatment, describe, group_parameters, role_of
from qarl.optim.optimizers import AdamW, Muon, NamedOptimizer
from qarl.optim.schedules import Constant, Cosine, Linear

OPTIMIZERS = {"adamw": AdamW, "muon": Muon}
OptimizerConfig = Annotated[AdamW | Muon, Field(discriminator="type")]

SCHEDULES = {"constant": Constant, "linear": Linear, "cosine": Cosine}
ScheduleConfig = Annotated[Constant | Linear | Cosine, Field(discriminator="type")]

__all__ = [
    "OPTIMIZERS",
    "SCHEDULES",
    "AdamW",
    "Constant",
    "Cosine",
    "Linear",
    "Muon",
    "NamedOptimizer",
    "OptimizerConfig",
    "ParameterGroup",
    "ScheduleConfig",
    "Treatment",
    "clip_grad_norm",
    "describe",
    "group_parameters",
    "role_of",
]
