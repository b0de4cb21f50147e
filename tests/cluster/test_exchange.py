"""Tensors between two ranks: rows that do not divide evenly, sums in the ranks' order, nothing lost."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qarl.cluster.crew import Crew
from qarl.cluster.exchange import Exchange

HEIGHTS = (1, 2, 5, 8)


def test_rows_are_those_of_torchs_chunk() -> None:
    for count in (1, 2, 3, 4):
        for height in range(1, 10):
            sizes = [len(rows) for rows in Exchange(0, count).rows_of(height)]
            chunks = [len(chunk) for chunk in torch.zeros(height).chunk(count)]
            assert sizes == chunks + [0] * (count - len(chunks))


def matrix(height: int, rank: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(height, 3, generator=generator) * 100).to(dtype)


def own(crew: Crew, whole: Tensor) -> Tensor:
    rows = crew.exchange.rows_of(len(whole))[crew.rank]
    return whole[rows.start : rows.stop]


def gathered(crew: Crew, height: int, dtype: torch.dtype) -> Tensor:
    return crew.exchange.gather(own(crew, matrix(height, dtype=dtype)), height)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.int16, torch.float8_e4m3fn])
@pytest.mark.parametrize("height", HEIGHTS)
def test_gathered_rows_are_the_matrix(pair, height: int, dtype: torch.dtype) -> None:
    whole = matrix(height, dtype=dtype)
    for found in pair(gathered, height, dtype):
        assert found.dtype == dtype
        assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8))


def reduced(crew: Crew, height: int) -> tuple[Tensor, int]:
    before = crew.exchange.sent
    found = crew.exchange.reduce(matrix(height, crew.rank))
    return found, crew.exchange.sent - before


@pytest.mark.parametrize("height", HEIGHTS)
def test_each_rank_gets_its_rows_of_the_sum_and_sends_the_others(pair, height: int) -> None:
    parts = pair(reduced, height)
    assert torch.equal(torch.cat([rows for rows, _ in parts]), matrix(height, 0) + matrix(height, 1))
    assert sum(sent for _, sent in parts) == height * 3 * 4


def totalled(crew: Crew) -> Tensor:
    # In fp32 the order of these decides: 1e8 + 1 is 1e8.
    return crew.exchange.total(torch.tensor([1e8, 1.0]) if crew.rank == 0 else torch.tensor([1.0, -1e8]))


def test_a_total_is_the_same_on_every_rank(pair) -> None:
    first, second = pair(totalled)
    assert torch.equal(first, second)
    assert first.tolist() == [1e8, -1e8]


def ragged(crew: Crew) -> list[list[list[float]]]:
    return [part.tolist() for part in crew.exchange.ragged(torch.full((2 * crew.rank, 1), float(crew.rank)))]


def test_lengths_may_differ_and_be_zero(pair) -> None:
    assert pair(ragged) == [[[], [[1.0], [1.0]]]] * 2


def objects(crew: Crew) -> list[object]:
    return crew.exchange.objects({"rank": crew.rank, "words": "x" * (100 * crew.rank)})


def test_everyone_sees_everyones_object(pair) -> None:
    expected = [{"rank": 0, "words": ""}, {"rank": 1, "words": "x" * 100}]
    assert pair(objects) == [expected, expected]


def there_and_back(crew: Crew, height: int) -> Tensor | None:
    whole = matrix(height)
    rows = torch.zeros_like(own(crew, whole))
    crew.exchange.scatter(whole if crew.leads else None, rows, height)
    assert torch.equal(rows, own(crew, whole))
    return crew.exchange.collect(rows, height)


@pytest.mark.parametrize("height", HEIGHTS)
def test_what_the_leader_scatters_it_collects(pair, height: int) -> None:
    at_leader, elsewhere = pair(there_and_back, height)
    assert torch.equal(at_leader, matrix(height))
    assert elsewhere is None


def broadcast(crew: Crew) -> Tensor:
    found = torch.tensor(7.0 if crew.leads else 0.0)
    crew.exchange.broadcast(found)
    return found


def test_a_number_is_the_leaders_everywhere(pair) -> None:
    assert [float(found) for found in pair(broadcast)] == [7.0, 7.0]
