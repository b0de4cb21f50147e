"""Granularity: which elements share one scale, and what that scale is.

Shape letters: N output channels (or tokens), K input features, G scales along K, H scales along N,
E elements that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

SMALLEST_AMAX = 2.0**-100
"""Elements that share a scale and are all smaller than this count as zero: the scale and its inverse stay
normal fp32 numbers, so hardware that flushes denormals computes the same codes."""


@dataclass(frozen=True, slots=True)
class PerRow:
    """One scale a row: per output channel of a weight, per token of activations."""

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, 1

    def multiple_of(self) -> int:
        """What the number of columns must be a multiple of."""
        return 1

    def split(self, x_NK: Tensor) -> Tensor:
        """[N, K] to [N, 1, K]."""
        return x_NK.unsqueeze(1)

    def join(self, x_HGE: Tensor, rows: int) -> Tensor:
        """The inverse of `split`."""
        return x_HGE.squeeze(1)


@dataclass(frozen=True, slots=True)
class PerGroup:
    """One scale for every `size` neighbours along a row."""

    size: int

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return rows, columns // self.size

    def multiple_of(self) -> int:
        """What the number of columns must be a multiple of."""
        return self.size

    def split(self, x_NK: Tensor) -> Tensor:
        """[N, K] to [N, K / size, size]."""
        return x_NK.reshape(x_NK.shape[0], -1, self.size)

    def join(self, x_HGE: Tensor, rows: int) -> Tensor:
        """The inverse of `split`."""
        return x_HGE.flatten(1)


@dataclass(frozen=True, slots=True)
class PerBlock:
    """One scale for every block of `rows` x `columns`; the last block of rows may be incomplete."""

    rows: int
    columns: int

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.rows), columns // self.columns

    def multiple_of(self) -> int:
        """What the number of columns must be a multiple of."""
        return self.columns

    def split(self, x_NK: Tensor) -> Tensor:
        """[N, K] to [ceil(N / rows), K / columns, rows * columns], missing rows as zeros."""
        rows, columns = x_NK.shape
        blocks_high, blocks_wide = self.scale_shape(rows, columns)
        padded = pad(x_NK, (0, 0, 0, -rows % self.rows))
        blocks = padded.reshape(blocks_high, self.rows, blocks_wide, self.columns)
        return blocks.transpose(1, 2).flatten(2)

    def join(self, x_HGE: Tensor, rows: int) -> Tensor:
        """The inverse of `split`."""
        blocks_high, blocks_wide, _ = x_HGE.shape
        blocks = x_HGE.reshape(blocks_high, blocks_wide, self.rows, self.columns).transpose(1, 2)
        return blocks.flatten(2).flatten(0, 1)[:rows]


Granularity = PerRow | PerGroup | PerBlock


def scale_and_inverse(amax: Tensor, largest: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Scale `amax / largest` and factor `largest / amax`, each one correctly rounded fp32 division.

    In another `dtype` than fp32 the scale is rounded to it, and the factor is one over what that gives.

    `amax` fp32, finite, >= 0, any shape. Where it is below `SMALLEST_AMAX` the scale is 1 and the factor 0,
    so that the codes are 0.
    """
    is_zero = amax < SMALLEST_AMAX
    safe_amax = amax.masked_fill(is_zero, 1.0)
    # Both operands are tensors: torch may turn a division by or of a Python number into a multiplication
    # with a rounded reciprocal.
    limit = torch.full_like(safe_amax, largest)
    scale, factor = safe_amax / limit, limit / safe_amax
    if dtype != torch.float32:
        scale = scale.to(dtype).float()
        is_zero = is_zero | (scale == 0)
        factor = torch.ones_like(scale) / scale
    return scale.masked_fill_(is_zero, 1.0), factor.masked_fill_(is_zero, 0.0)
