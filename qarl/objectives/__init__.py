"""Objectives: log-probabilities and advantages of a micro-batch to its share of the loss, and how it was clipped."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from qarl.objectives.acr import Acr
from qarl.objectives.cispo import Cispo
from qarl.objectives.dual_clip import DualClip
from qarl.objectives.grpo import Dapo, DrGrpo, Grpo
from qarl.objectives.gspo import Gspo
from qarl.objectives.policy_loss import PolicyObjective
from qarl.objectives.positive_only import PositiveOnly
from qarl.objectives.reinforce import Reinforce
from qarl.objectives.tbpo import Tbpo

ObjectiveConfig = Annotated[
    Grpo | DrGrpo | Dapo | Gspo | Cispo | DualClip | PositiveOnly | Reinforce | Tbpo | Acr,
    Field(discriminator="type"),
]

OBJECTIVES: dict[str, type[PolicyObjective]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "gspo": Gspo,
    "cispo": Cispo,
    "dual_clip": DualClip,
    "positive_only": PositiveOnly,
    "reinforce": Reinforce,
    "tbpo": Tbpo,
    "acr": Acr,
}

__all__ = [
    "OBJECTIVES",
    "ObjectiveConfig",
    "PolicyObjective",
    "Grpo",
    "DrGrpo",
    "Dapo",
    "Gspo",
    "Cispo",
    "DualClip",
    "PositiveOnly",
    "Reinforce",
    "Tbpo",
    "Acr",
]
