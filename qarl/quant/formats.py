"""Number formats: the grid one code lives on, rounding to it, and the packed form of 4-bit codes.

A format knows nothing of scales: values arrive already divided by theirs. `SLACK` and `rounding_error` are
the error bounds that tests and reports use; nobody tunes them elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

NIBBLES_PER_INT32 = 8

SLACK = 4 * 2.0**-24
"""Relative error of the fp32 operations around the rounding (scale, its inverse, product, dequantization)."""


@dataclass(frozen=True, slots=True)
class IntegerFormat:
    """Signed integers on the symmetric grid [-largest, largest], held in int8, or int16 where that is too narrow.

    The most negative two's complement value is unused: only a symmetric grid is idempotent under amax scales.
    """

    name: str
    bits: int
    largest: float

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.int8 if self.bits <= 8 else torch.int16

    def round_to_grid(self, scaled: Tensor) -> Tensor:
        """Nearest code of finite fp32 values, halves to even, clamped to the grid; `code_dtype`, same shape."""
        return scaled.round().clamp_(-self.largest, self.largest).to(self.code_dtype)

    def rounding_error(self, scaled: Tensor) -> Tensor:
        """Largest distance from each value inside the grid's range to its code; same shape."""
        return torch.full_like(scaled, 0.5)


@dataclass(frozen=True, slots=True)
class E4M3Format:
    """8-bit floating point, 4 exponent and 3 mantissa bits, no infinities (arXiv 2209.05433): up to 448."""

    name: str = "e4m3"
    bits: int = 8
    largest: float = 448.0

    @property
    def code_dtype(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def round_to_grid(self, scaled: Tensor) -> Tensor:
        """Nearest code of finite fp32 values, halves to even, clamped to the grid; float8_e4m3fn, same shape."""
        # Whether the cast alone saturates or makes NaN of values past 464 differs between versions of torch.
        return scaled.clamp(-self.largest, self.largest).to(torch.float8_e4m3fn)

    def rounding_error(self, scaled: Tensor) -> Tensor:
        """Largest distance from each value inside the grid's range to its code; same shape.

        Half a step: 2^-4 of the value's power of two, and 2^-10 below the smallest normal number 2^-6.
        """
        magnitude = scaled.abs().clamp(min=2.0**-6)
        return torch.ldexp(torch.ones_like(scaled), torch.frexp(magnitude).exponent - 1) * 2.0**-4


NumberFormat = IntegerFormat | E4M3Format

INT16 = IntegerFormat("int16", bits=16, largest=127.0 * 256.0)
"""For gradients. Two int8 planes, code = 256 high + low with |high| <= 127: GEMMs may multiply plane by plane."""

INT12 = IntegerFormat("int12", bits=12, largest=2047.0)
"""As precise as bf16 in a dot product, and narrow enough that 512 products fit an int32 sum."""

INT8 = IntegerFormat("int8", bits=8, largest=127.0)
INT4 = IntegerFormat("int4", bits=4, largest=7.0)
INT3 = IntegerFormat("int3", bits=3, largest=3.0)
INT2 = IntegerFormat("int2", bits=2, largest=1.0)
E4M3 = E4M3Format()


def round_to_type(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Nearest values of a floating-point type, halves to even, any shape; those that have it already themselves."""
    return values.to(dtype)


def pack_int4(codes_NK: Tensor) -> Tensor:
    """Pack 4-bit codes as compressed-tensors `pack-quantized`: int32 [N, ceil(K / 8)].

    `codes_NK` int8 in [-8, 7]; each is stored as code + 8 in four bits, lowest bits first along K. The last
    int32 of a row is filled with zero bits.
    """
    nibbles = (codes_NK + 8).to(torch.uint8)
    nibbles = pad(nibbles, (0, -codes_NK.shape[1] % NIBBLES_PER_INT32))
    octets = nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)
    return octets.contiguous().view(torch.int32)


def unpack_int4(packed: Tensor, columns: int) -> Tensor:
    """Codes int8 [N, columns] of `pack_int4`'s int32 [N, ceil(columns / 8)]."""
    octets = packed.contiguous().view(torch.uint8)
    nibbles = torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)
    return nibbles[:, :columns].to(torch.int8) - 8
