"""The plain policy gradient. Shape letters: B sequences, T tokens."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field

from qarl.objectives.policy_loss import AGGREGATION_HELP, CorrectedObjective, Surrogate
from qarl.objectives.terms import Aggregation, ratio_metrics, ratio_to_old
from qarl.records import LossInputs


class Reinforce(CorrectedObjective):
    """`J_t = A new_t` (Williams, 1992): no ratio and no clip, so right for one update per rollout batch.

    With `token_tis` it is FlashRL's REINFORCE form, weight `min(learner / engine, C)`. The ratio is reported, not
    used: its drift from 1 would stay uncorrected, so recipes with more than one update per batch are refused.
    """

    type: Literal["reinforce"] = "reinforce"
    aggregation: Aggregation = Field("token_mean", description=AGGREGATION_HELP)

    @property
    def allows_several_updates(self) -> bool:
        """Not several: nothing here knows that the policy has moved since the rollout."""
        return False

    def uncorrected(self, inputs: LossInputs) -> Surrogate:
        """J_t at each token [B, T]."""
        new_BT = torch.where(inputs.mask_BT, inputs.new_BT, 0.0)
        return Surrogate(inputs.advantages_B[:, None] * new_BT, ratio_metrics(ratio_to_old(inputs), inputs.mask_BT))
