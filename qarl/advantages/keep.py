"""Which groups are worth training on. Shape letter: G completions of a group."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from qarl.records import Advantages, Group


def has_spread(rewards_G: Tensor) -> bool:
    """Whether at least two valid (not NaN) rewards [G] differ; compared exactly, without a tolerance."""
    valid = rewards_G[~rewards_G.isnan()]
    return len(valid) > 1 and bool(valid.min() < valid.max())


def zero_std_groups(rewards: Sequence[Tensor]) -> int:
    """How many groups have valid rewards that are all equal, and so teach nothing; all-NaN groups do not count."""
    return sum(not has_spread(rewards_G) and not bool(rewards_G.isnan().all()) for rewards_G in rewards)


def drop_zero_std(
    groups: Sequence[Group], advantages: Advantages, rewards: Sequence[Tensor]
) -> tuple[list[Group], list[Tensor]]:
    """The groups whose valid rewards differ, with their advantages [G], in order; possibly none.

    The filter of DAPO's dynamic sampling (arXiv 2503.14476) without its oversampling: the batch gets smaller.
    All-NaN groups are dropped too. The three sequences must be equally long.
    """
    kept = [
        (group, advantages_G)
        for group, advantages_G, rewards_G in zip(groups, advantages, rewards, strict=True)
        if has_spread(rewards_G)
    ]
    return [group for group, _ in kept], [advantages_G for _, advantages_G in kept]
