"""Weights that correct for the engine's distribution differing from the learner's.

All are functions of `old - engine` without gradient; they multiply the per-token loss last, and change neither
the mask nor any denominator. Where engine and learner agree bit for bit every weight is exactly 1. The
per-sequence ratio is either `geometric`, exp(mean(old - engine)), or `product`, exp(sum(old - engine)); the
product collapses to 0 or its cap over thousands of tokens. Shape letters: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from qarl.config import Config
from qarl.metrics import Max, Mean, Metrics
from qarl.objectives.terms import (
    mean_over,
    mismatch_log_ratio,
    sequence_lengths,
    sequence_log_mean,
)
from qarl.records import LossInputs

SequenceRatio = Literal["geometric", "product"]
SEQUENCE_RATIO_HELP = "geometric: exp of the mean log-ratio; product: exp of the sum."


@dataclass(frozen=True, slots=True, eq=False)
class CorrectionWeights:
    """`weights` [B, T], or [B, 1] when all tokens of a sequence share one; no gradient."""

    weights: Tensor
    metrics: Metrics


class NoCorrection(Config):
    """Weight 1: right when engine and learner agree exactly, or to measure what the mismatch costs."""

    type: Literal["none"] = "none"

    def __call__(self, inputs: LossInputs) -> CorrectionWeights:
        """Ones [B, 1], and no metrics."""
        return CorrectionWeights(inputs.old_BT.new_ones(len(inputs.old_BT), 1), {})


class TokenTis(Config):
    """Truncated importance sampling: `min(exp(old - engine), C)` per token (FlashRL, "off-policy RL", 2025)."""

    type: Literal["token_tis"] = "token_tis"
    cap: float = Field(2.0, gt=0.0, description="C: the largest weight; 2 or 8 in FlashRL's scripts.")

    def __call__(self, inputs: LossInputs) -> CorrectionWeights:
        """Weights [B, T] in (0, cap]."""
        mismatch_BT = mismatch_log_ratio(inputs).exp()
        metrics = {"correction/truncated": mean_over(mismatch_BT > self.cap, inputs.mask_BT)}
        return _reported(mismatch_BT.clamp(max=self.cap), inputs.mask_BT, metrics)


class SequenceTis(Config):
    """`min(sequence ratio, C)` on every token of the sequence (verl's `rollout_is=sequence` is the product)."""

    type: Literal["sequence_tis"] = "sequence_tis"
    ratio: SequenceRatio = Field("geometric", description=SEQUENCE_RATIO_HELP)
    cap: float = Field(2.0, gt=0.0, description="C: the largest weight; 2 to 10 is usual for the product.")

    def __call__(self, inputs: LossInputs) -> CorrectionWeights:
        """Weights [B, 1] in (0, cap]."""
        mismatch_B1 = _sequence_mismatch(inputs, self.ratio)
        metrics = {"correction/truncated": mean_over(mismatch_B1 > self.cap, _has_tokens(inputs))}
        return _reported(mismatch_B1.clamp(max=self.cap), inputs.mask_BT, metrics)


class IcePop(Config):
    """`w = exp(old - engine)` where low <= w <= high, else 0, per token (IcePop; verl's two-sided threshold)."""

    type: Literal["icepop"] = "icepop"
    low: float = Field(0.5, ge=0.0, description="Tokens with a smaller ratio get weight 0.")
    high: float = Field(5.0, gt=0.0, description="Tokens with a larger ratio get weight 0.")

    @model_validator(mode="after")
    def _band_is_ordered(self) -> Self:
        _require_ordered("icepop", self.low, self.high)
        return self

    def __call__(self, inputs: LossInputs) -> CorrectionWeights:
        """Weights [B, T], 0 or in [low, high]."""
        mismatch_BT = mismatch_log_ratio(inputs).exp()
        inside_BT = (mismatch_BT >= self.low) & (mismatch_BT <= self.high)
        metrics = {"correction/dropped": mean_over(~inside_BT, inputs.mask_BT)}
        return _reported(torch.where(inside_BT, mismatch_BT, 0.0), inputs.mask_BT, metrics)


class Mis(Config):
    """Rejection by sequence: weight 1 when low <= sequence ratio <= high, else 0.

    The geometric form is Geo-RS, the product form Seq-MIS (verl's `rollout_rs`). The sequence still counts in
    the denominators, so a rejected one makes the step smaller rather than the others louder.
    """

    type: Literal["mis"] = "mis"
    ratio: SequenceRatio = Field("geometric", description=SEQUENCE_RATIO_HELP)
    low: float | None = Field(
        None, ge=0.0, description="Sequences with a smaller ratio are dropped; default 0.999 geometric, 0.5 product."
    )
    high: float | None = Field(
        None, gt=0.0, description="Sequences with a larger ratio are dropped; default 1.001 geometric, 2.0 product."
    )

    @model_validator(mode="after")
    def _band_is_ordered(self) -> Self:
        _require_ordered("mis", *self.band)
        return self

    @property
    def band(self) -> tuple[float, float]:
        """The bounds in force."""
        low, high = (0.999, 1.001) if self.ratio == "geometric" else (0.5, 2.0)
        return low if self.low is None else self.low, high if self.high is None else self.high

    def __call__(self, inputs: LossInputs) -> CorrectionWeights:
        """Weights [B, 1], 0 or 1."""
        low, high = self.band
        mismatch_B1 = _sequence_mismatch(inputs, self.ratio)
        inside_B1 = (mismatch_B1 >= low) & (mismatch_B1 <= high)
        metrics = {"correction/dropped": mean_over(~inside_B1, _has_tokens(inputs))}
        return _reported(inside_B1.to(mismatch_B1.dtype), inputs.mask_BT, metrics)


class Ais(Config):
    """Adaptive importance sampling: `1 - lambda + lambda * min(w, C)`, w = exp(old - engine) per token.

    The interpolation and its diagnostics (effective sample size, mean absolute log-ratio) are those of AIS
    (arXiv 2605.13907). Its formula for lambda is not public, so this one is ours, per sequence so that splitting
    a batch cannot change it: `lambda = clip(max(1 - ESS / T, mean |log w| / divergence_scale), 0, 1)` with
    `ESS = (sum w)^2 / sum w^2` over the sequence's T trained tokens. (AIS's third diagnostic, the coefficient
    of variation, says the same as ESS: ESS / T = 1 / (1 + cv^2).)
    """

    type: Literal["ais"] = "ais"
    cap: float = Field(2.0, gt=0.0, description="C: the largest importance weight.")
    divergence_scale: float = Field(
        0.1, gt=0.0, description="Mean absolute log-ratio of a sequence at which it is corrected in full."
    )

    def __call__(self, inputs: LossInputs) -> CorrectionWeights:
        """Weights [B, T] in [0, max(1, cap)]; `correction/lambda` is their mean strength over sequences."""
        log_mismatch_BT = mismatch_log_ratio(inputs)
        mismatch_BT = log_mismatch_BT.exp()
        lengths_B1 = sequence_lengths(inputs.mask_BT)
        counted_BT = torch.where(inputs.mask_BT, mismatch_BT, 0.0)
        sums_B1, squares_B1 = counted_BT.sum(-1, keepdim=True), counted_BT.square().sum(-1, keepdim=True)
        # A sequence without trained tokens has no weights at all; any positive divisor will do.
        reliability_B1 = sums_B1.square() / squares_B1.clamp(min=torch.finfo(squares_B1.dtype).tiny) / lengths_B1
        divergence_B1 = sequence_log_mean(log_mismatch_BT.abs(), inputs.mask_BT) / self.divergence_scale
        strength_B1 = torch.maximum(1.0 - reliability_B1, divergence_B1).clamp(0.0, 1.0)
        metrics = {
            "correction/lambda": mean_over(strength_B1, _has_tokens(inputs)),
            "correction/truncated": mean_over(mismatch_BT > self.cap, inputs.mask_BT),
        }
        weights_BT = 1.0 - strength_B1 + strength_B1 * mismatch_BT.clamp(max=self.cap)
        return _reported(weights_BT, inputs.mask_BT, metrics)


CorrectionConfig = Annotated[NoCorrection | TokenTis | SequenceTis | IcePop | Mis | Ais, Field(discriminator="type")]

CorrectionClass = type[NoCorrection] | type[TokenTis] | type[SequenceTis] | type[IcePop] | type[Mis] | type[Ais]

CORRECTIONS: dict[str, CorrectionClass] = {
    "none": NoCorrection,
    "token_tis": TokenTis,
    "sequence_tis": SequenceTis,
    "icepop": IcePop,
    "mis": Mis,
    "ais": Ais,
}


def weight_metrics(weights: Tensor, mask_BT: Tensor) -> Metrics:
    """`correction/weight_mean` and `weight_max` over trained tokens of weights [B, T] or [B, 1]."""
    if not bool(mask_BT.any()):
        return {}
    weights_BT = weights.expand_as(mask_BT)
    return {
        "correction/weight_mean": mean_over(weights_BT, mask_BT),
        "correction/weight_max": Max(float(weights_BT[mask_BT].max())),
    }


def _reported(weights: Tensor, mask_BT: Tensor, fractions: Mapping[str, Mean]) -> CorrectionWeights:
    return CorrectionWeights(weights, {**fractions, **weight_metrics(weights, mask_BT)})


def _sequence_mismatch(inputs: LossInputs, ratio: SequenceRatio) -> Tensor:
    log_mismatch_BT = mismatch_log_ratio(inputs)
    if ratio == "geometric":
        return sequence_log_mean(log_mismatch_BT, inputs.mask_BT).exp()
    # May overflow to infinity, which every user of it caps or drops.
    return log_mismatch_BT.sum(-1, keepdim=True).exp()


def _has_tokens(inputs: LossInputs) -> Tensor:
    return inputs.mask_BT.any(-1, keepdim=True)


def _require_ordered(name: str, low: float, high: float) -> None:
    if low >= high:
        raise ValueError(f"{name}: low {low:g} must be below high {high:g}")
