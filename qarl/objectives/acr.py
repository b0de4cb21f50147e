"""QuRL's adaptive clipping range for rollouts from a quantized engine. Shape letters: B sequences, T tokens."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from qarl.objectives.corrections import weight_metrics
from qarl.objectives.grpo import CLIP_HIGH_HELP, CLIP_LOW_HELP
from qarl.objectives.policy_loss import PolicyObjective, Surrogate
from qarl.objectives.terms import mean_over, mismatch_log_ratio, ratio_metrics, ratio_to_old
from qarl.records import LossInputs


class Acr(PolicyObjective):
    """`J_t = w min(R A, clip(R, 1 - low, (1 + high) / r) A)` (QuRL, arXiv 2602.13953, equation 9).

    `q = exp(old - engine)`, `w = min(q, C)`, `r = min(1, C / q)`: where truncation made the weight smaller than the
    ratio it stands for, the upper clip widens by as much. Only tokens with A > 0, q > C and R > 1 + high differ
    from token TIS, so with one update per batch nothing does. It carries its own correction; there is no other.
    """

    type: Literal["acr"] = "acr"
    clip_ratio_low: float = Field(0.2, gt=0.0, lt=1.0, description=CLIP_LOW_HELP)
    clip_ratio_high: float = Field(0.2, gt=0.0, description=CLIP_HIGH_HELP + " Widened where the weight is truncated.")
    cap: float = Field(2.0, gt=0.0, description="C: the largest importance weight.")

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """J_t at each token [B, T]; `correction/truncated` is the fraction of tokens with q > C."""
        ratio_BT = ratio_to_old(inputs)
        mismatch_BT = mismatch_log_ratio(inputs).exp()
        weights_BT = mismatch_BT.clamp(max=self.cap)
        lower = 1.0 - self.clip_ratio_low
        upper_BT = (1.0 + self.clip_ratio_high) / (self.cap / mismatch_BT).clamp(max=1.0)
        advantages_B1 = inputs.advantages_B[:, None]
        clipped_BT = torch.minimum(ratio_BT.clamp(min=lower), upper_BT)
        objective_BT = weights_BT * torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
        mask_BT = inputs.mask_BT
        metrics = ratio_metrics(ratio_BT, mask_BT) | weight_metrics(weights_BT, mask_BT)
        metrics |= {
            "objective/clipped_low": mean_over((advantages_B1 < 0) & (ratio_BT < lower), mask_BT),
            "objective/clipped_high": mean_over((advantages_B1 > 0) & (ratio_BT > upper_BT), mask_BT),
            "correction/truncated": mean_over(mismatch_BT > self.cap, mask_BT),
        }
        return Surrogate(objective_BT, metrics)
