"""Advantages from the rewards of a group: what each completion's reward is compared with.

Shared rules. NaN rewards stay NaN and enter no statistic. Rewards that are all equal give exactly 0, found by
comparison and not by a small divisor: in float32 the mean of eight 0.2 is not 0.2, and a tiny standard
deviation would blow that residue up. A group with a single valid reward has nothing to compare it with and
counts as equal: advantage 0. Arithmetic is float64, results are float32. Shape letter: G completions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from qarl.config import Config
from qarl.errors import RunError
from qarl.records import Advantages

STD_FLOOR = 1e-6
"""Added to a standard deviation before dividing by it (GRPO, arXiv 2402.03300, as in verl)."""


class RewardItself(Config):
    """A = R, no baseline: the only choice that works with group_size = 1.

    Plain REINFORCE (Williams, 1992); its gradient is unbiased and noisy. Pair it with rewards centred on 0.
    """

    type: Literal["none"] = "none"
    needs_group: ClassVar[bool] = False

    def __call__(self, rewards: Sequence[Tensor]) -> Advantages:
        """Rewards [G] of every group, unchanged; an infinite reward raises RunError."""
        return [_finite_or_nan(rewards_G).float() for rewards_G in rewards]


class GroupMean(Config):
    """A = R - mean(R) over the group (Dr. GRPO, arXiv 2503.20783)."""

    type: Literal["group_mean"] = "group_mean"
    needs_group: ClassVar[bool] = True

    def __call__(self, rewards: Sequence[Tensor]) -> Advantages:
        """Rewards [G] of every group to advantages [G]; an infinite reward raises RunError."""
        return [_centred(rewards_G).float() for rewards_G in rewards]


class GroupStd(Config):
    """A = (R - mean(R)) / (std(R) + 1e-6) over the group (GRPO, arXiv 2402.03300).

    `std` is the unbiased one (divides by G - 1), as verl and TRL compute it.
    """

    type: Literal["group_std"] = "group_std"
    needs_group: ClassVar[bool] = True

    def __call__(self, rewards: Sequence[Tensor]) -> Advantages:
        """Rewards [G] of every group to advantages [G]; an infinite reward raises RunError."""
        return [_over_std(_centred(rewards_G)).float() for rewards_G in rewards]


class LeaveOneOut(Config):
    """A_i = R_i - mean of the other rewards (RLOO, arXiv 2402.14740).

    That is n / (n - 1) * (R_i - mean(R)) for n valid rewards.
    """

    type: Literal["leave_one_out"] = "leave_one_out"
    needs_group: ClassVar[bool] = True

    def __call__(self, rewards: Sequence[Tensor]) -> Advantages:
        """Rewards [G] of every group to advantages [G]; an infinite reward raises RunError."""
        return [_leave_one_out(rewards_G).float() for rewards_G in rewards]


class BatchNormalized(Config):
    """A = R - mean(R) over the group, then (A - mean(A)) / (std(A) + 1e-6) over all completions of the batch.

    The decoupled form of REINFORCE++ as BroRL uses it (arXiv 2510.01180): a group's own spread does not scale
    it, so that nearly solved prompts are not inflated. `std` is unbiased and, like the mean, counts completions
    (verl's counts tokens); groups of equal rewards count in it and come out as exactly 0.
    """

    type: Literal["batch_normalized"] = "batch_normalized"
    needs_group: ClassVar[bool] = True

    def __call__(self, rewards: Sequence[Tensor]) -> Advantages:
        """Rewards [G] of every group of one batch to advantages [G]; an infinite reward raises RunError."""
        if not rewards:
            return []
        centred = [_centred(rewards_G) for rewards_G in rewards]
        # The batch's mean is 0 already: it is the mean of groups that were each centred. Subtracting its rounding
        # residue would only move equal groups off 0.
        normalized = _over_std(torch.cat(centred))
        return [part.float() for part in normalized.split([len(group) for group in centred])]


def has_spread(rewards_G: Tensor) -> bool:
    """Whether at least two valid (not NaN) rewards [G] differ; compared exactly, without a tolerance."""
    valid = rewards_G[~rewards_G.isnan()]
    return len(valid) > 1 and bool(valid.min() < valid.max())


def _centred(rewards_G: Tensor) -> Tensor:
    exact_G = _finite_or_nan(rewards_G).double()
    if not has_spread(rewards_G):
        return torch.where(exact_G.isnan(), exact_G, torch.zeros_like(exact_G))
    return exact_G - exact_G.nanmean()


def _over_std(centred: Tensor) -> Tensor:
    valid = centred[~centred.isnan()]
    # With one value the unbiased std is NaN; that value is 0 already.
    return centred / (valid.std() + STD_FLOOR) if len(valid) > 1 else centred


def _leave_one_out(rewards_G: Tensor) -> Tensor:
    count = int((~rewards_G.isnan()).sum())
    return _centred(rewards_G) * (count / max(count - 1, 1))


def _finite_or_nan(rewards_G: Tensor) -> Tensor:
    if bool(rewards_G.isinf().any()):
        raise RunError(
            f"rewards {rewards_G.tolist()} of one group contain infinity; a reward that cannot be computed must be NaN"
        )
    return rewards_G
