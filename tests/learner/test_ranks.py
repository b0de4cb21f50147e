"""A learner alone, and one that other ranks run ahead of."""

from __future__ import annotations

import pytest
import torch

from qarl.errors import RunError
from qarl.learner.ranks import Alone
from qarl.metrics import Mean


class OneOfTwo(Alone):
    """The second of two ranks, whose first one adds nothing to what it is told."""

    index, count = 1, 2

    def __init__(self) -> None:
        self.agreed = 0

    def agree(self, failure: RunError | None) -> None:
        self.agreed += 1
        super().agree(failure)


def test_alone_everything_is_as_it_is() -> None:
    alone, values = Alone(), torch.ones(2)
    assert (alone.index, alone.count) == (0, 1)
    assert alone.merged({"a": Mean(1.0, 2.0)}) == {"a": Mean(1.0, 2.0)}
    assert alone.norm_of([torch.tensor([3.0]), torch.tensor([4.0])]) == 5.0
    assert alone.fetch("key", values).data_ptr() == values.data_ptr()
    alone.place(torch.tensor([7.0, 8.0]), values)
    assert values.tolist() == [7.0, 8.0]
    alone.agree(None)
    with pytest.raises(RunError, match="mine"):
        alone.agree(RunError("mine"))


def test_a_rank_with_less_to_do_stands_by_and_changes_nothing(small) -> None:
    """The first completion is so long that the second rank has the rest, in fewer micro-batches than the first."""
    learner = small.learner("w8a8-int8", micro_batch_tokens=1)
    groups = small.rollout(learner, 3, group_size=5)
    advantages = [torch.tensor([1.0, -1.0, 1.0, 0.5, 0.5])]
    learner.ranks = OneOfTwo()
    learner.update(groups, advantages)
    own = learner.ranks.agreed

    again = small.learner("w8a8-int8", micro_batch_tokens=1)
    again.ranks = OneOfTwo()
    before = again._optimizer_step
    again._optimizer_step = lambda *arguments: before(*arguments[:4], arguments[4] + 2)
    again.update(groups, advantages)
    assert again.ranks.agreed == own + 2
    for (name, one), (_, other) in zip(
        learner.decoder.named_parameters(), again.decoder.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name
