"""Dual-clip PPO: a bound from above on the loss of tokens with negative advantage. Shape letters: B, T."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from qarl.objectives.grpo import TokenClip
from qarl.objectives.policy_loss import AGGREGATION_HELP, Surrogate
from qarl.objectives.terms import Aggregation, mean_over, ratio_to_old
from qarl.records import LossInputs


class DualClip(TokenClip):
    """`J_t` of the token clip for A >= 0; `max(J_t, c A)` for A < 0 (arXiv 1912.09729, equation 5).

    Past `R > c` a token with A < 0 gives no gradient. A positive advantage is never affected.
    """

    type: Literal["dual_clip"] = "dual_clip"
    clip_ratio_c: float = Field(3.0, gt=1.0, description="c: for A < 0 the ratio counts as at most this; above 1.")
    aggregation: Aggregation = Field("token_mean", description=AGGREGATION_HELP)

    def uncorrected(self, inputs: LossInputs) -> Surrogate:
        """J_t at each token [B, T]; `objective/clipped_dual` is the fraction of tokens that c bounded."""
        plain = super().uncorrected(inputs)
        advantages_B1 = inputs.advantages_B[:, None]
        bounded_BT = torch.maximum(plain.objective_BT, self.clip_ratio_c * advantages_B1)
        objective_BT = torch.where(advantages_B1 < 0, bounded_BT, plain.objective_BT)
        bound_BT = (advantages_B1 < 0) & (ratio_to_old(inputs) > self.clip_ratio_c)
        return Surrogate(objective_BT, plain.metrics | {"objective/clipped_dual": mean_over(bound_BT, inputs.mask_BT)})
