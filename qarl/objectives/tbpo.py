"""Trust-band policy optimization: a band on both sides of the sequence ratio where the advantage is negative.

Shape letters: B sequences, T tokens, 1 an axis that broadcasts.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from qarl.metrics import Metrics
from qarl.objectives.corrections import weight_metrics
from qarl.objectives.policy_loss import PolicyObjective, Surrogate
from qarl.objectives.salvage import mask_before_errors
from qarl.objectives.terms import (
    clipped_surrogate,
    masked_log_ratio,
    mean_over,
    mismatch_log_ratio,
    ratio_metrics,
    sequence_log_mean,
    sequence_ratio,
)
from qarl.records import LossInputs
from qarl.roles import LossReport


class Tbpo(PolicyObjective):
    """TBPO (QaRL, arXiv 2604.07853), for answers that contain error tokens of a low-bit engine.

    With `r = exp(mean_t(new - old))` and `w = min(exp(mean_t(old - engine)), cap)` of a sequence, w without gradient:
    for A >= 0 `J = w min(r A, clip(r, 1 - low, 1 + high) A)`; for A < 0 `J = w r A` if
    `1 - neg_low <= r <= 1 + neg_high`, else the sequence gives no gradient. Ordinary clipping bounds a negative
    advantage from below only, while an error token's ratio explodes upward. w is part of the objective; there
    is no other correction.
    """

    type: Literal["tbpo"] = "tbpo"
    seq_clip_ratio_low: float = Field(
        3e-4, gt=0.0, lt=1.0,
        description="Lower clip for A >= 0, as in the formula; its minimum never selects it, so it has no effect.",
    )  # fmt: skip
    seq_clip_ratio_high: float = Field(4e-4, gt=0.0, description="For A >= 0 the ratio is clipped at 1 plus this.")
    neg_seq_clip_ratio_low: float = Field(
        3e-4, gt=0.0, lt=1.0, description="For A < 0 a sequence with a ratio below 1 minus this gives no gradient."
    )
    neg_seq_clip_ratio_high: float = Field(
        7e-4, gt=0.0, description="For A < 0 a sequence with a ratio above 1 plus this gives no gradient."
    )
    cap: float = Field(2.0, gt=0.0, description="Largest mismatch weight of a sequence.")
    mismatch_low: float | None = Field(
        None, gt=0.0, description="Sequences whose mismatch ratio exp(mean(old - engine)) is smaller are dropped."
    )
    mismatch_high: float | None = Field(
        None, gt=0.0, description="Sequences whose mismatch ratio exp(mean(old - engine)) is larger are dropped."
    )
    salvage_probability: float | None = Field(
        None, gt=0.0, lt=1.0,
        description="Keep what precedes the first error token: a token that engine or learner gave less than this "
        "probability, followed by the onset of repetition. Off by default.",
    )  # fmt: skip
    salvage_ngram: int = Field(4, ge=1, description="Salvage: this many tokens occurring again are a repetition.")
    salvage_window: int = Field(
        16, ge=0, description="Salvage: the repetition sets in at most this many tokens after the error token."
    )

    @model_validator(mode="after")
    def _mismatch_band_is_ordered(self) -> Self:
        if self.mismatch_low is not None and self.mismatch_high is not None and self.mismatch_low >= self.mismatch_high:
            raise ValueError(f"mismatch_low {self.mismatch_low:g} must be below mismatch_high {self.mismatch_high:g}")
        return self

    def __call__(self, inputs: LossInputs) -> LossReport:
        """This micro-batch's share of the batch's loss; `tbpo/*` are fractions of its sequences."""
        if self.salvage_probability is None:
            return super().__call__(inputs)
        kept_BT = self._mask_before_errors(inputs, math.log(self.salvage_probability))
        report = super().__call__(dataclasses.replace(inputs, mask_BT=kept_BT))
        cut_B = (kept_BT != inputs.mask_BT).any(-1)
        salvaged: Metrics = {"tbpo/salvaged": mean_over(cut_B, inputs.mask_BT.any(-1))}
        return LossReport(report.loss, report.metrics | salvaged)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """J on every token [B, T]; ratio metrics and fractions count sequences."""
        mask_BT, advantages_B1 = inputs.mask_BT, inputs.advantages_B[:, None]
        ratio_BT = sequence_ratio(masked_log_ratio(inputs.new_BT, inputs.old_BT, mask_BT), mask_BT)
        mismatch_B1 = sequence_log_mean(mismatch_log_ratio(inputs), mask_BT).exp()
        ratio_B1 = ratio_BT[:, :1].detach()
        below_B1 = (advantages_B1 < 0) & (ratio_B1 < 1.0 - self.neg_seq_clip_ratio_low)
        above_B1 = (advantages_B1 < 0) & (ratio_B1 > 1.0 + self.neg_seq_clip_ratio_high)
        dropped_B1 = self._outside_mismatch_band(mismatch_B1)
        weights_B1 = torch.where(dropped_B1, 0.0, mismatch_B1.clamp(max=self.cap))
        positive_BT = clipped_surrogate(ratio_BT, advantages_B1, self.seq_clip_ratio_low, self.seq_clip_ratio_high)
        negative_BT = torch.where(below_B1 | above_B1, 0.0, ratio_BT * advantages_B1)
        objective_BT = weights_B1 * torch.where(advantages_B1 >= 0, positive_BT, negative_BT)
        clipped_B1 = (advantages_B1 > 0) & (ratio_B1 > 1.0 + self.seq_clip_ratio_high)
        trained_B1 = mask_BT.any(-1, keepdim=True)
        metrics = ratio_metrics(ratio_B1, trained_B1) | weight_metrics(weights_B1, mask_BT)
        metrics |= {
            "objective/clipped_low": mean_over(below_B1, trained_B1),
            "objective/clipped_high": mean_over(clipped_B1 | above_B1, trained_B1),
            "tbpo/pos_clipped": mean_over(clipped_B1, trained_B1),
            "tbpo/neg_below": mean_over(below_B1, trained_B1),
            "tbpo/neg_above": mean_over(above_B1, trained_B1),
            "tbpo/mismatch_dropped": mean_over(dropped_B1, trained_B1),
        }
        return Surrogate(objective_BT, metrics)

    def _outside_mismatch_band(self, mismatch_B1: Tensor) -> Tensor:
        low = 0.0 if self.mismatch_low is None else self.mismatch_low
        high = math.inf if self.mismatch_high is None else self.mismatch_high
        return (mismatch_B1 < low) | (mismatch_B1 > high)

    def _mask_before_errors(self, inputs: LossInputs, log_threshold: float) -> Tensor:
        assert inputs.tokens_BT is not None, "salvage looks for repetition and needs the tokens"
        least_BT = torch.minimum(inputs.engine_BT, inputs.old_BT).detach()
        return mask_before_errors(
            inputs.tokens_BT, inputs.mask_BT, least_BT, log_threshold, self.salvage_ngram, self.salvage_window
        )
