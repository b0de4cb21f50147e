"""Clipped importance-sampling weights: the weight is clipped, no token loses its gradient. Letters: B, T."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from qarl.objectives.policy_loss import AGGREGATION_HELP, CorrectedObjective, Surrogate
from qarl.objectives.terms import Aggregation, mean_over, ratio_metrics, ratio_to_old
from qarl.records import LossInputs


class Cispo(CorrectedObjective):
    """`J_t = stop(clip(R_t, 1 - low, 1 + high)) A new_t` (CISPO, MiniMax-M1, arXiv 2506.13585, equation 4)."""

    type: Literal["cispo"] = "cispo"
    clip_ratio_low: float = Field(
        10.0, gt=0.0, description="The weight is at least 1 minus this; 1 or more turns the lower bound off."
    )
    clip_ratio_high: float = Field(0.2, gt=0.0, description="The weight is at most 1 plus this.")
    aggregation: Aggregation = Field("token_mean", description=AGGREGATION_HELP)

    def uncorrected(self, inputs: LossInputs) -> Surrogate:
        """J_t at each token [B, T]; clipped fractions count tokens whose weight was clipped, whatever A is."""
        ratio_BT = ratio_to_old(inputs).detach()
        weights_BT = ratio_BT.clamp(1.0 - self.clip_ratio_low, 1.0 + self.clip_ratio_high)
        metrics = ratio_metrics(ratio_BT, inputs.mask_BT) | {
            "objective/clipped_low": mean_over(ratio_BT < 1.0 - self.clip_ratio_low, inputs.mask_BT),
            "objective/clipped_high": mean_over(ratio_BT > 1.0 + self.clip_ratio_high, inputs.mask_BT),
        }
        new_BT = torch.where(inputs.mask_BT, inputs.new_BT, 0.0)
        return Surrogate(weights_BT * inputs.advantages_B[:, None] * new_BT, metrics)
