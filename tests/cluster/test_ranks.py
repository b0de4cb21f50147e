"""What a learner asks of the other ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from qarl.cluster.crew import Crew
from qarl.cluster.masters import ShardedMasters
from qarl.cluster.ranks import CrewRanks
from qarl.errors import RunError
from qarl.metrics import Max, Mean, Metrics


def agreed(crew: Crew, failing: list[int]) -> str:
    failure = RunError(f"of rank {crew.rank}") if crew.rank in failing else None
    try:
        CrewRanks(crew.exchange).agree(failure)
    except RunError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("failing", "words"), [([], ""), ([0], "of rank 0"), ([1], "of rank 1"), ([0, 1], "of rank 0")]
)
def test_a_failure_of_one_rank_is_raised_on_all(pair, failing: list[int], words: str) -> None:
    assert pair(agreed, failing) == [words, words]


def merged(crew: Crew) -> Metrics:
    own: Metrics = {"mean": Mean(crew.rank + 1.0, 1.0), f"only/{crew.rank}": Max(5.0)}
    return CrewRanks(crew.exchange).merged(own)


def test_metrics_are_those_of_all_ranks(pair) -> None:
    assert pair(merged) == [{"mean": Mean(3.0, 2.0), "only/0": Max(5.0), "only/1": Max(5.0)}] * 2


def norms(crew: Crew, sick: bool) -> tuple[list[float], float]:
    """A matrix of ones divided in two, and a gain to which each rank adds its share."""
    masters, ranks = ShardedMasters(crew.exchange), CrewRanks(crew.exchange)
    matrix, gain = nn.Parameter(masters.shard(torch.zeros(3, 3))), nn.Parameter(torch.zeros(4))
    with masters.gradients(matrix) as (buffer,):
        buffer += 0.5
    gain.grad = torch.full((4,), 1.0 + crew.rank)
    assert isinstance(matrix.grad, DTensor)
    if sick and crew.rank == 1:
        matrix.grad.to_local()[0, 0] = math.nan
    ranks.add_up([matrix, gain])
    return gain.grad.tolist(), ranks.norm_of([matrix.grad, gain.grad])


def test_gradients_of_vectors_are_added_up_and_count_once(pair) -> None:
    expected = math.sqrt(9 * 1.0 + 4 * 9.0)
    for gains, norm in pair(norms, False):
        assert gains == [3.0] * 4
        assert norm == pytest.approx(expected, rel=1e-7)  # rows are reduced in fp32


def test_a_gradient_that_is_not_finite_on_one_rank_is_so_on_all(pair) -> None:
    assert all(math.isnan(norm) for _, norm in pair(norms, True))


def placed(crew: Crew) -> tuple[list[float], list[float], float]:
    masters, ranks = ShardedMasters(crew.exchange), CrewRanks(crew.exchange)
    matrix, gain, count = masters.shard(torch.zeros(3, 1)), torch.zeros(2), torch.zeros(())
    known = [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([4.0, 5.0]), torch.tensor(6.0)]
    for values, into in zip(known if crew.leads else [None] * 3, (matrix, gain, count), strict=True):
        ranks.place(values, into)
    return masters.whole(matrix)[:, 0].tolist(), gain.tolist(), float(count)


def test_state_that_the_leader_read_is_placed_on_all(pair) -> None:
    assert pair(placed) == [([1.0, 2.0, 3.0], [4.0, 5.0], 6.0)] * 2
