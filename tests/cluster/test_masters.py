"""Masters by rows: what is published has the bits of one process, and gradients are sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qarl.cluster.crew import Crew
from qarl.cluster.masters import ShardedMasters
from qarl.errors import RunError
from qarl.models.decoder import Decoder
from qarl.ops.masters import WHOLE
from qarl.ops.operand import quantize_weight
from qarl.quant import QuantConfig, plan_schemes
from qarl.quant.scheme import SCHEMES
from qarl.sync.snapshot import take_snapshot

QUANTIZED = [name for name, scheme in SCHEMES.items() if scheme.quantized]


def weight(height: int) -> Tensor:
    found = torch.randn(height, 128, generator=torch.Generator().manual_seed(height))
    found[0] = 0.0
    return found


def quantized(crew: Crew, height: int, served: int, scheme: str) -> tuple[Tensor, Tensor]:
    masters = ShardedMasters(crew.exchange)
    found = masters.quantize(masters.shard(weight(height)), served, SCHEMES[scheme], "w")
    return found.codes.view(torch.uint8), found.scale


@pytest.mark.parametrize("scheme", QUANTIZED)
@pytest.mark.parametrize(("height", "served"), [(1, 1), (5, 5), (200, 200), (200, 77)])
def test_codes_and_scales_are_those_of_the_whole_matrix(pair, height: int, served: int, scheme: str) -> None:
    exact = quantize_weight(weight(height)[:served], SCHEMES[scheme], "w")
    for codes, scale in pair(quantized, height, served, scheme):
        assert torch.equal(codes, exact.codes.view(torch.uint8))
        assert torch.equal(scale, exact.scale)


def checksum(crew: Crew | None, small: Any, scheme: str, tied: bool) -> str:
    """Of a whole model's snapshot, once as this rank holds it; without a crew, as one process does."""
    import dataclasses

    small = dataclasses.replace(small, config=dataclasses.replace(small.config, tie_embeddings=tied))
    decoder = Decoder(small.config, small.sampleable)
    tensors = small.weights()
    if crew is not None:
        masters = ShardedMasters(crew.exchange)
        decoder.held_by(masters)
        tensors = {name: masters.shard(tensor) for name, tensor in tensors.items()}
    decoder.assign(tensors, requires_grad=True)
    plan = plan_schemes(decoder.matrices(), SCHEMES[scheme], QuantConfig())
    snapshot = take_snapshot(decoder, plan.quantized, 3)
    for name in snapshot.tensors:  # what is read back from operands is what was published
        assert snapshot.tensors[name].numel() > 0
    return snapshot.checksum


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_publishes_the_bytes_of_one_process(pair, small, scheme: str, tied: bool) -> None:
    assert pair(checksum, small, scheme, tied) == [checksum(None, small, scheme, tied)] * 2


def sick(crew: Crew) -> str:
    whole = weight(6)
    whole[5, 3] = torch.inf  # a row of the last rank
    masters = ShardedMasters(crew.exchange)
    try:
        masters.quantize(masters.shard(whole), 6, SCHEMES["w8a8-int8"], "layer.weight")
    except RunError as error:
        return str(error)
    return "nothing"


def test_a_number_that_is_not_finite_on_one_rank_is_everyones_error(pair) -> None:
    for words in pair(sick):
        assert words.startswith("layer.weight: non-finite values")


def gradients(crew: Crew) -> tuple[list[Tensor], list[Tensor]]:
    """Two shares of each of two matrices, then rows of the first."""
    masters = ShardedMasters(crew.exchange)
    found = [nn.Parameter(masters.shard(torch.zeros(height, 4))) for height in (5, 2)]
    for share in (1.0, 10.0):
        with masters.gradients(*found) as buffers:
            for buffer in buffers:
                assert not bool(buffer.any())
                buffer += share * (crew.rank + 1) * torch.arange(len(buffer))[:, None]
    masters.add_rows(found[0], torch.tensor([4, 0, 4][: crew.rank + 1]), torch.full((crew.rank + 1, 4), 100.0))
    grads = [parameter.grad for parameter in found if isinstance(parameter.grad, DTensor)]
    return [grad.full_tensor()[:, 0] for grad in grads], [grad.to_local()[:, 0] for grad in grads]


def test_each_rank_keeps_its_rows_of_the_sum_of_all_shares(pair) -> None:
    for rank, (whole, own) in enumerate(pair(gradients)):
        # Rank 0 adds to row 4; rank 1 to rows 4 and 0.
        assert whole[0].tolist() == [100.0, 33.0, 66.0, 99.0, 132.0 + 200.0]
        assert whole[1].tolist() == [0.0, 33.0]
        assert [len(rows) for rows in own] == [[3, 1], [2, 1]][rank]


def held(crew: Crew) -> tuple[bool, bool, bool]:
    masters = ShardedMasters(crew.exchange)
    matrix, gain = masters.shard(weight(4)), masters.shard(torch.ones(4))
    assert torch.equal(masters.whole(matrix), weight(4)) and torch.equal(masters.whole(gain), torch.ones(4))
    return isinstance(matrix, DTensor), masters.values(matrix) is None, masters.values(gain) is gain or True


def test_matrices_are_divided_and_vectors_are_not(pair) -> None:
    assert pair(held) == [(True, True, True)] * 2


def test_one_process_has_all_values() -> None:
    matrix = weight(3)
    values = WHOLE.values(matrix)
    assert values is not None
    assert values.data_ptr() == WHOLE.whole(matrix).data_ptr() == matrix.data_ptr()
