"""Trust-band policy optimization: a band on both sides of the sequence ratio where the advantage is negative.

Shape letters: B sequences, T tokens, 1 an axis that broadcasts, X the one or the other, by level.
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
    is no other correction. At the level of tokens `r = exp(new - old)` and `w = min(exp(old - engine), cap)` (ours).
    """

    type: Literal["tbpo"] = "tbpo"
    level: Literal["sequence", "token"] = Field(
        "sequence",
        description="Whose ratios r and w are; `token`: each token has its own, and is what a band takes the gradient "
        "from. Its bands want other widths than a sequence's, about 0.2.",
    )
    seq_clip_ratio_low: float = Field(
        3e-4, gt=0.0, lt=1.0,
        description="Lower clip for A >= 0, as in the formula; its minimum never selects it, so it has no effect.",
    )  # fmt: skip
    seq_clip_ratio_high: float = Field(4e-4, gt=0.0, description="For A >= 0 the ratio is clipped at 1 plus this.")
    neg_seq_clip_ratio_low: float = Field(
        3e-4,
        gt=0.0,
        le=1.0,
        description="For A < 0 a sequence with a ratio below 1 minus this gives no gradient; 1: no lower band.",
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
        """This micro-batch's share of the batch's loss; `tbpo/*` are fractions of its sequences, or of its tokens."""
        if self.salvage_probability is None:
            return super().__call__(inputs)
        kept_BT = self._mask_before_errors(inputs, math.log(self.salvage_probability))
        report = super().__call__(dataclasses.replace(inputs, mask_BT=kept_BT))
        cut_B = (kept_BT != inputs.mask_BT).any(-1)
        salvaged: Metrics = {"tbpo/salvaged": mean_over(cut_B, inputs.mask_BT.any(-1))}
        return LossReport(report.loss, report.metrics | salvaged)

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """J on every token [B, T]; ratio metrics and fractions count sequences, or tokens at their level."""
        mask_BT, advantages_B1 = inputs.mask_BT, inputs.advantages_B[:, None]
        ratio_BT, mismatch_BX, trained_BX = self._ratios(inputs)
        ratio_BX = ratio_BT[:, : trained_BX.shape[1]].detach()
        below_BX = (advantages_B1 < 0) & (ratio_BX < 1.0 - self.neg_seq_clip_ratio_low)
        above_BX = (advantages_B1 < 0) & (ratio_BX > 1.0 + self.neg_seq_clip_ratio_high)
        dropped_BX = self._outside_mismatch_band(mismatch_BX)
        weights_BX = torch.where(dropped_BX, 0.0, mismatch_BX.clamp(max=self.cap))
        positive_BT = clipped_surrogate(ratio_BT, advantages_B1, self.seq_clip_ratio_low, self.seq_clip_ratio_high)
        negative_BT = torch.where(below_BX | above_BX, 0.0, ratio_BT * advantages_B1)
        objective_BT = weights_BX * torch.where(advantages_B1 >= 0, positive_BT, negative_BT)
        clipped_BX = (advantages_B1 > 0) & (ratio_BX > 1.0 + self.seq_clip_ratio_high)
        metrics = ratio_metrics(ratio_BX, trained_BX) | weight_metrics(weights_BX, mask_BT)
        metrics |= {
            "objective/clipped_low": mean_over(below_BX, trained_BX),
            "objective/clipped_high": mean_over(clipped_BX | above_BX, trained_BX),
            "tbpo/pos_clipped": mean_over(clipped_BX, trained_BX),
            "tbpo/neg_below": mean_over(below_BX, trained_BX),
            "tbpo/neg_above": mean_over(above_BX, trained_BX),
            "tbpo/mismatch_dropped": mean_over(dropped_BX, trained_BX),
        }
        return Surrogate(objective_BT, metrics)

    def _ratios(self, inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
        """r on every token [B, T] with gradient; w before its cap, and what is trained: [B, 1], or [B, T] of tokens."""
        log_ratio_BT = masked_log_ratio(inputs.new_BT, inputs.old_BT, inputs.mask_BT)
        log_mismatch_BT = mismatch_log_ratio(inputs)
        if self.level == "token":
            return log_ratio_BT.exp(), log_mismatch_BT.exp(), inputs.mask_BT
        mismatch_B1 = sequence_log_mean(log_mismatch_BT, inputs.mask_BT).exp()
        return sequence_ratio(log_ratio_BT, inputs.mask_BT), mismatch_B1, inputs.mask_BT.any(-1, keepdim=True)

    def _outside_mismatch_band(self, mismatch: Tensor) -> Tensor:
        low = 0.0 if self.mismatch_low is None else self.mismatch_low
        high = math.inf if self.mismatch_high is None else self.mismatch_high
        return (mismatch < low) | (mismatch > high)

    def _mask_before_errors(self, inputs: LossInputs, log_threshold: float) -> Tensor:
        assert inputs.tokens_BT is not None, "salvage looks for repetition and needs the tokens"
        least_BT = torch.minimum(inputs.engine_BT, inputs.old_BT).detach()
        return mask_before_errors(
            inputs.tokens_BT, inputs.mask_BT, least_BT, log_threshold, self.salvage_ngram, self.salvage_window
        )
