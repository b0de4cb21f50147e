"""Rewards of a group to advantages: one number a completion that says how much better than expected it was."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from qarl.advantages.group import BatchNormalized, GroupMean, GroupStd, LeaveOneOut, RewardItself

AdvantageConfig = Annotated[
    RewardItself | GroupMean | GroupStd | LeaveOneOut | BatchNormalized, Field(discriminator="type")
]

AdvantageClass = type[RewardItself] | type[GroupMean] | type[GroupStd] | type[LeaveOneOut] | type[BatchNormalized]

ADVANTAGES: dict[str, AdvantageClass] = {
    "none": RewardItself,
    "group_mean": GroupMean,
    "group_std": GroupStd,
    "leave_one_out": LeaveOneOut,
    "batch_normalized": BatchNormalized,
}

__all__ = [
    "ADVANTAGES",
    "AdvantageConfig",
    "RewardItself",
    "GroupMean",
    "GroupStd",
    "LeaveOneOut",
    "BatchNormalized",
]
