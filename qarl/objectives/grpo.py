"""Objectives that clip each token's ratio: GRPO, Dr. GRPO, DAPO. They differ in defaults only.

Shape letters: B sequences, T tokens.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qarl.objectives.policy_loss import AGGREGATION_HELP, CorrectedObjective, Surrogate
from qarl.objectives.terms import Aggregation, clipped_surrogate, mean_over, ratio_metrics, ratio_to_old
from qarl.records import LossInputs

CLIP_LOW_HELP = "The ratio is clipped from below at 1 minus this; binds for A < 0."
CLIP_HIGH_HELP = "The ratio is clipped from above at 1 plus this; binds for A > 0."


class TokenClip(CorrectedObjective):
    """`J_t = min(R_t A, clip(R_t, 1 - low, 1 + high) A)` with `R_t = exp(new_t - old_t)` (PPO, arXiv 1707.06347)."""

    clip_ratio_low: float = Field(0.2, gt=0.0, lt=1.0, description=CLIP_LOW_HELP)
    clip_ratio_high: float = Field(0.2, gt=0.0, description=CLIP_HIGH_HELP)

    def uncorrected(self, inputs: LossInputs) -> Surrogate:
        """J_t at each token [B, T]; clipped fractions count tokens whose gradient the clip removed."""
        ratio_BT = ratio_to_old(inputs)
        advantages_B1 = inputs.advantages_B[:, None]
        low_BT = (advantages_B1 < 0) & (ratio_BT < 1.0 - self.clip_ratio_low)
        high_BT = (advantages_B1 > 0) & (ratio_BT > 1.0 + self.clip_ratio_high)
        metrics = ratio_metrics(ratio_BT, inputs.mask_BT) | {
            "objective/clipped_low": mean_over(low_BT, inputs.mask_BT),
            "objective/clipped_high": mean_over(high_BT, inputs.mask_BT),
        }
        objective_BT = clipped_surrogate(ratio_BT, advantages_B1, self.clip_ratio_low, self.clip_ratio_high)
        return Surrogate(objective_BT, metrics)


class Grpo(TokenClip):
    """GRPO (arXiv 2402.03300): token clip at 0.2, mean over each sequence's tokens, then over sequences.

    Pair it with the `group_std` advantage.
    """

    type: Literal["grpo"] = "grpo"


class DrGrpo(TokenClip):
    """Dr. GRPO (arXiv 2503.20783): as GRPO, but tokens are summed and divided by a constant, so that a long wrong
    answer is not punished less per token than a short one. Pair it with the `group_mean` advantage.
    """

    type: Literal["dr_grpo"] = "dr_grpo"
    aggregation: Aggregation = Field("constant", description=AGGREGATION_HELP)


class Dapo(TokenClip):
    """DAPO (arXiv 2503.14476): clip-higher 0.28 and the mean over all tokens of the batch.

    Its dynamic sampling is `sampling.max_rounds`, its overlong penalty the reward term `length`. Pair it with the
    `group_std` advantage.
    """

    type: Literal["dapo"] = "dapo"
    clip_ratio_high: float = Field(0.28, gt=0.0, description=CLIP_HIGH_HELP)
    aggregation: Aggregation = Field("token_mean", description=AGGREGATION_HELP)
