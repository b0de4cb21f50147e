"""Training on the better completions only. Shape letters: B sequences, T tokens."""

from __future__ import annotations

from typing import Literal

import torch

from qarl.metrics import Metrics
from qarl.objectives.grpo import TokenClip
from qarl.objectives.policy_loss import Surrogate
from qarl.objectives.terms import mean_over
from qarl.records import LossInputs


class PositiveOnly(TokenClip):
    """`J_t` of the token clip where A > 0, else 0: completions worse than expected give no gradient.

    The baseline against which trust bands on negative advantages are judged: error tokens sit in wrong answers,
    so leaving those out removes the instability and with it what wrong answers teach. As in rejection-sampling
    fine-tuning (RAFT, arXiv 2304.06767) with a PPO clip; left-out sequences still count in the denominators.
    """

    type: Literal["positive_only"] = "positive_only"

    def uncorrected(self, inputs: LossInputs) -> Surrogate:
        """J_t at each token [B, T]; `objective/negative_dropped` is the fraction of sequences with A < 0."""
        plain = super().uncorrected(inputs)
        objective_BT = torch.where(inputs.advantages_B[:, None] > 0, plain.objective_BT, 0.0)
        dropped: Metrics = {
            "objective/negative_dropped": mean_over(inputs.advantages_B < 0, inputs.mask_BT.any(-1)),
        }
        return Surrogate(objective_BT, plain.metrics | dropped)
