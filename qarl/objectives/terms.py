"""The vocabulary of losses: masked log-ratios, sequence ratios, aggregation, KL estimators, metric fractions.

A log-ratio is masked first, then clamped, then exponentiated: a padding value is never exponentiated, and no
ratio can leave [exp(-20), exp(20)]. Shape letters: B sequences, T tokens, 1 an axis that broadcasts.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from qarl.metrics import Max, Mean, Metrics
from qarl.records import LossInputs

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +- this (verl `core_algos`); past it a ratio has no gradient."""

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
KlEstimator = Literal["k1", "k2", "k3"]


def masked_log_ratio(upper_BT: Tensor, lower_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`upper - lower` in [-20, 20], and 0 without gradient where the mask is False. [B, T]."""
    difference_BT = torch.where(mask_BT, upper_BT - lower_BT, 0.0)
    return difference_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio_to_old(inputs: LossInputs) -> Tensor:
    """The PPO ratio `exp(new - old)` of each token [B, T], with gradient; 1 under a False mask."""
    return masked_log_ratio(inputs.new_BT, inputs.old_BT, inputs.mask_BT).exp()


def mismatch_log_ratio(inputs: LossInputs) -> Tensor:
    """`old - engine` of each token [B, T], without gradient; 0 under a False mask."""
    return masked_log_ratio(inputs.old_BT, inputs.engine_BT, inputs.mask_BT).detach()


def sequence_lengths(mask_BT: Tensor) -> Tensor:
    """Trained tokens of each sequence [B, 1], at least 1 so that a sequence without any divides safely."""
    return mask_BT.sum(-1, keepdim=True).clamp(min=1)


def sequence_log_mean(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over a sequence's trained tokens [B, 1] of a masked log-ratio; 0 for a sequence without any.

    Its exponential is the length-normalized sequence ratio (GSPO, arXiv 2507.18071).
    """
    return log_ratio_BT.sum(-1, keepdim=True) / sequence_lengths(mask_BT)


def sequence_ratio(log_ratio_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The sequence ratio's value on every token, with that token's own gradient [B, T].

    `stop(r_seq) * exp(new_t - stop(new_t))` (GSPO-token, arXiv 2507.18071). Summed over a sequence its gradient
    is that of `exp(mean(new - old))`, and unlike it, it lets a per-token weight act on that token alone.
    """
    value_B1 = sequence_log_mean(log_ratio_BT, mask_BT).detach().exp()
    return value_B1 * (log_ratio_BT - log_ratio_BT.detach()).exp()


def clipped_surrogate(ratio_BT: Tensor, advantages_B1: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """`min(R A, clip(R, 1 - low, 1 + high) A)`, to be maximised (PPO, arXiv 1707.06347, equation 7). [B, T]."""
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)


def aggregate(per_token_BT: Tensor, inputs: LossInputs, how: Aggregation) -> Tensor:
    """This micro-batch's share of the whole batch's mean, a scalar; values under a False mask do not enter.

    token_mean: sum over tokens / tokens of the batch (DAPO, arXiv 2503.14476). sequence_mean: mean over each
    sequence's tokens, then sum / sequences of the batch (GRPO, arXiv 2402.03300). constant: sum over tokens /
    (longest possible completion * sequences of the batch) (Dr. GRPO, arXiv 2503.20783).
    """
    masked_BT = torch.where(inputs.mask_BT, per_token_BT, 0.0)
    if how == "token_mean":
        # A batch in which nothing is trained has no tokens; its loss is 0.
        return masked_BT.sum() / max(inputs.num_tokens, 1)
    if how == "sequence_mean":
        means_B1 = masked_BT.sum(-1, keepdim=True) / sequence_lengths(inputs.mask_BT)
        return means_B1.sum() / max(inputs.num_sequences, 1)
    return masked_BT.sum() / (inputs.max_new_tokens * max(inputs.num_sequences, 1))


def kl_to_reference(inputs: LossInputs, estimator: KlEstimator) -> Tensor:
    """Estimate of KL(policy || reference) at each token [B, T] with gradient; 0 under a False mask.

    With `x = reference - new`: k1 = -x, k2 = x^2 / 2, k3 = exp(x) - x - 1 (Schulman, "Approximating KL
    divergence", 2020). k2 and k3 are never negative. The gradient of k1 has expectation 0 on-policy.
    """
    assert inputs.reference_BT is not None, "an objective with a KL term needs reference log-probabilities"
    x_BT = masked_log_ratio(inputs.reference_BT, inputs.new_BT, inputs.mask_BT)
    if estimator == "k1":
        return -x_BT
    if estimator == "k2":
        return 0.5 * x_BT.square()
    return x_BT.exp() - x_BT - 1.0


def mean_over(values: Tensor, where: Tensor) -> Mean:
    """Mean of the values (flags count as 0 and 1) at the places where `where`, of the same shape, is True."""
    return Mean(float(values.detach()[where].double().sum()), float(where.sum()))


def ratio_metrics(ratio: Tensor, where: Tensor) -> Metrics:
    """`objective/ratio_max` and `ratio_mean` over the places where `where` is True; none if there are none."""
    if not bool(where.any()):
        return {}
    return {
        "objective/ratio_max": Max(float(ratio.detach()[where].max())),
        "objective/ratio_mean": mean_over(ratio, where),
    }
