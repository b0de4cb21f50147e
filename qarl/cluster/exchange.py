"""What ranks do with tensors together: rows gathered, gradients scattered and summed, always in the ranks' order.

Sums are made here of what arrives, not by the library on the way: so they have the same bits however a message is cut
up, and on every rank. Shape letters: R ranks, N rows of a matrix, n of them here, K columns.
"""

from __future__ import annotations

import pickle
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """One rank's end; `sent` counts the bytes that it sent to others."""

    def __init__(self, index: int, count: int) -> None:
        self.index = index
        self.count = count
        self.sent = 0

    def rows_of(self, height: int) -> list[range]:
        """Which rows of a matrix each rank holds: those of `torch.chunk`, as DTensor's Shard(0) has it."""
        each = -(-height // self.count)
        edges = [min(rank * each, height) for rank in range(self.count + 1)]
        return [range(start, stop) for start, stop in pairwise(edges)]

    def gather(self, own_nK: Tensor, height: int) -> Tensor:
        """All rows [N, K] of a matrix of which each rank gives its own."""
        each = -(-height // self.count)
        # As bytes: not every library knows every kind of code.
        padded = own_nK.new_zeros(each, *own_nK.shape[1:]).view(torch.uint8)
        padded[: len(own_nK)] = own_nK.contiguous().view(torch.uint8)
        whole = padded.new_empty(self.count * each, *padded.shape[1:])
        dist.all_gather_single(whole, padded)
        self._count(padded, self.count - 1)
        # Only ranks at the end have fewer rows than `each`.
        return whole[:height].view(own_nK.dtype)

    def reduce(self, share_NK: Tensor) -> Tensor:
        """This rank's rows [n, K] of the sum of all ranks' shares."""
        rows = self.rows_of(len(share_NK))
        own = len(rows[self.index])
        arrived = share_NK.new_empty(self.count * own, share_NK.shape[1])
        dist.all_to_all_single(arrived, share_NK, [own] * self.count, [len(some) for some in rows])
        self._count(share_NK, 1 - own / max(len(share_NK), 1))
        return _summed(arrived.view(self.count, own, share_NK.shape[1]))

    def total(self, share: Tensor) -> Tensor:
        """The sum of all ranks' shares, on every rank; of small tensors."""
        return _summed(self.each(share))

    def each(self, own: Tensor) -> Tensor:
        """All ranks' tensors of one shape, [R, ...]."""
        arrived = own.new_empty(self.count, *own.shape)
        dist.all_gather_single(arrived, own.contiguous()[None])
        self._count(own, self.count - 1)
        return arrived

    def ragged(self, own_TK: Tensor) -> list[Tensor]:
        """All ranks' tensors, whose lengths differ."""
        lengths = self.each(torch.tensor(len(own_TK))).tolist()
        padded = own_TK.new_zeros(max(lengths), *own_TK.shape[1:])
        padded[: len(own_TK)] = own_TK
        return [some[:length] for some, length in zip(self.each(padded), lengths, strict=True)]

    def objects(self, own: Any) -> list[Any]:
        """Everyone's small object."""
        content = torch.frombuffer(bytearray(pickle.dumps(own)), dtype=torch.uint8)
        return [pickle.loads(some.numpy().tobytes()) for some in self.ragged(content)]

    def scatter(self, whole_NK: Tensor | None, own_nK: Tensor, height: int) -> None:
        """Fill `own_nK` with this rank's rows of a matrix that rank 0 has."""
        each = -(-height // self.count)
        received = own_nK.new_empty(each, *own_nK.shape[1:])
        parts = None
        if whole_NK is not None:
            padded = own_nK.new_zeros(self.count * each, *own_nK.shape[1:])
            padded[:height] = whole_NK
            parts = list(padded.split(each))
            self._count(received, self.count - 1)
        dist.scatter(received, parts, 0)
        own_nK.copy_(received[: len(own_nK)])

    def collect(self, own_nK: Tensor, height: int) -> Tensor | None:
        """All rows [N, K] at rank 0, None elsewhere."""
        each = -(-height // self.count)
        padded = own_nK.new_zeros(each, *own_nK.shape[1:])
        padded[: len(own_nK)] = own_nK
        whole = own_nK.new_empty(self.count * each, *own_nK.shape[1:]) if self.index == 0 else None
        dist.gather(padded, None if whole is None else list(whole.split(each)), 0)
        self._count(padded, int(self.index != 0))
        return None if whole is None else whole[:height]

    def broadcast(self, tensor: Tensor) -> None:
        """Set this to what rank 0 has."""
        dist.broadcast(tensor, 0)
        self._count(tensor, self.count - 1 if self.index == 0 else 0)

    def _count(self, tensor: Tensor, times: float) -> None:
        self.sent += round(tensor.numel() * tensor.dtype.itemsize * times)


def _summed(parts: Tensor) -> Tensor:
    """Over the first dimension, one after another."""
    found = parts[0].clone()
    for part in parts[1:]:
        found += part
    return found
