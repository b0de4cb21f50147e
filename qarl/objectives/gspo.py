"""Group sequence policy optimization: one ratio and one clip per sequence. Shape letters: B sequences, T tokens."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qarl.objectives.grpo import CLIP_HIGH_HELP, CLIP_LOW_HELP
from qarl.objectives.policy_loss import CorrectedObjective, Surrogate
from qarl.objectives.terms import clipped_surrogate, masked_log_ratio, mean_over, ratio_metrics, sequence_ratio
from qarl.records import LossInputs


class Gspo(CorrectedObjective):
    """`J = min(s A, clip(s, 1 - low, 1 + high) A)`, `s = exp(mean_t(new_t - old_t))` (GSPO, arXiv 2507.18071).

    Its clip ranges are a thousand times smaller than a token clip's because a mean over a sequence moves that
    much less. Per-token log-ratios are clamped to [-20, 20] (verl clamps their mean at 10).
    """

    type: Literal["gspo"] = "gspo"
    clip_ratio_low: float = Field(3e-4, gt=0.0, lt=1.0, description=CLIP_LOW_HELP)
    clip_ratio_high: float = Field(4e-4, gt=0.0, description=CLIP_HIGH_HELP)

    def uncorrected(self, inputs: LossInputs) -> Surrogate:
        """J on every token [B, T]; ratio metrics and clipped fractions count sequences."""
        ratio_BT = sequence_ratio(masked_log_ratio(inputs.new_BT, inputs.old_BT, inputs.mask_BT), inputs.mask_BT)
        ratio_B, trained_B = ratio_BT[:, 0], inputs.mask_BT.any(-1)
        low_B = (inputs.advantages_B < 0) & (ratio_B < 1.0 - self.clip_ratio_low)
        high_B = (inputs.advantages_B > 0) & (ratio_B > 1.0 + self.clip_ratio_high)
        metrics = ratio_metrics(ratio_B, trained_B) | {
            "objective/clipped_low": mean_over(low_B, trained_B),
            "objective/clipped_high": mean_over(high_B, trained_B),
        }
        advantages_B1 = inputs.advantages_B[:, None]
        return Surrogate(clipped_surrogate(ratio_BT, advantages_B1, self.clip_ratio_low, self.clip_ratio_high), metrics)
