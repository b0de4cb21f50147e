"""Low-rank adapters beside a projection: y + (x A^T) (s B)^T, in fp32 GEMMs of a fixed order (arXiv 2106.09685).

x is what the projection reads, after norm or gate and before quantization. The A of sibling matrices are stacked to one
product; their B are the blocks of one matrix, which holds them times the scale s, so that s is multiplied once.
Shape letters: T rows, K in, N out, R ranks of all siblings together; of one sibling n outputs and rank r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.ops.gradient import gradient_of
from qarl.ops.kernels import kernels


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The adapter of one matrix: A [r, K] and B [n, r]."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The adapters of a projection as they are multiplied: A [R, K] and s B [N, R], both packed.

    `heights` and `ranks` are the siblings' n and r; the rank of one without an adapter is 0.
    """

    a: Tensor
    b: Tensor
    heights: tuple[int, ...]
    ranks: tuple[int, ...]
    scale: float

    def add_to(self, y_TN: Tensor, x_TK: Tensor) -> Tensor:
        """y + x (s B A)^T, where `y_TN` is what the frozen matrices give."""
        return kernels().matmul(self._inner(x_TK), self.b, sum(self.heights), None, y_TN)

    def backward(self, grad_TN: Tensor, x_TK: Tensor, trained: Sequence[LowRank | None]) -> Tensor:
        """Gradient of x [T, K]; those of A and B are added to the `.grad` of `trained`, one for each sibling."""
        grad_inner_TR, inner_TR = grad_TN @ kernels().unpack(self.b, sum(self.heights)), self._inner(x_TK)
        parts = (grad_TN.split(self.heights, 1), grad_inner_TR.split(self.ranks, 1), inner_TR.split(self.ranks, 1))
        for part, grad, grad_inner, inner in zip(trained, *parts, strict=True):
            if part is not None:
                gradient_of(part.a).addmm_(grad_inner.t(), x_TK)
                gradient_of(part.b).addmm_(grad.t(), inner, alpha=self.scale)
        return grad_inner_TR @ kernels().unpack(self.a, sum(self.ranks))

    def _inner(self, x_TK: Tensor) -> Tensor:
        """x A^T [T, R]."""
        return kernels().matmul(x_TK, self.a, sum(self.ranks), None, None)


@torch.no_grad()
def adapter_of(parts: Sequence[LowRank | None], heights: Sequence[int], scale: float) -> Adapter:
    """One adapter of siblings with so many outputs, at least one of which has a part; copies."""
    present = [part for part in parts if part is not None]
    blocks = [torch.zeros(n, 0) if part is None else part.b * scale for part, n in zip(parts, heights, strict=True)]
    a, b = torch.cat([part.a for part in present]), torch.block_diag(*blocks)
    ranks = tuple(0 if part is None else len(part.a) for part in parts)
    return Adapter(kernels().pack(a), kernels().pack(b), tuple(heights), ranks, scale)
