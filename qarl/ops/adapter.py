"""Low-rank adapters beside a projection: y + (x A^T) (s B)^T, in fp32 GEMMs of a fixed order (arXiv 2106.09685).

x is what the projection reads, after norm or gate and before quantization. The A of sibling matrices are stacked to one
product; each one's B, which is kept times the scale s, meets its own part of that.
Shape letters: T rows, K in, N out, R ranks of all siblings together; of one sibling n outputs and rank r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.ops.device import HOST
from qarl.ops.gradient import gradient_of
from qarl.ops.kernels import kernels


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The adapter of one matrix: A [r, K] and B [n, r]."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The adapters of a projection as they are multiplied: A [R, K] and the s B [n, r], packed.

    `siblings_S3` has a row for each sibling that has one: its first output, its n, and the first of its ranks.
    """

    a: Tensor
    b: Tensor
    siblings_S3: Tensor
    scale: float

    def add_to_(self, y_TN: Tensor, x_TK: Tensor) -> Tensor:
        """Add x (s B A)^T to `y_TN`, what the frozen matrices make of x."""
        return kernels().add_low_rank_(y_TN, x_TK, self.a, self.b, self.siblings_S3)

    def backward(self, grad_TN: Tensor, x_TK: Tensor, trained: Sequence[LowRank | None]) -> Tensor:
        """Gradient of x [T, K]; those of A and B are added to the `.grad` of `trained`, in the siblings' order."""
        parts = [part for part in trained if part is not None]
        rank, siblings = self.b.shape[1], self.siblings_S3.tolist()
        a_RK = kernels().unpack(self.a, rank * len(siblings))
        packed = self.b.split([-(-height // kernels().panel) for _, height, _ in siblings])
        inner_TR, grad_inner_TR = x_TK @ a_RK.t(), x_TK.new_empty(len(x_TK), len(a_RK))
        for part, b, (column, height, first) in zip(parts, packed, siblings, strict=True):
            grad, own = grad_TN[:, column : column + height], slice(first, first + rank)
            grad_inner_TR[:, own] = grad @ kernels().unpack(b, height)
            gradient_of(part.a).addmm_(grad_inner_TR[:, own].t(), x_TK)
            gradient_of(part.b).addmm_(grad.t(), inner_TR[:, own], alpha=self.scale)
        return grad_inner_TR @ a_RK


@torch.no_grad()
def adapter_of(parts: Sequence[LowRank | None], heights: Sequence[int], scale: float) -> Adapter:
    """One adapter of siblings with so many outputs; some may have none, the others have one rank. Copies."""
    present = [part for part in parts if part is not None]
    columns = torch.tensor([0, *heights]).cumsum(0).tolist()
    siblings = [
        (column, height) for part, column, height in zip(parts, columns, heights, strict=False) if part is not None
    ]
    rank = len(present[0].a)
    table = torch.tensor([(column, height, i * rank) for i, (column, height) in enumerate(siblings)], device=HOST)
    a = kernels().pack(torch.cat([part.a for part in present]))
    b = torch.cat([kernels().pack(part.b * scale) for part in present])
    return Adapter(a, b, table, scale)
