"""Schemes: how the weights and activations of a linear layer are stored, by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from qarl.errors import ConfigurationError, suggestion
from qarl.quant.formats import E4M3, INT2, INT3, INT4, INT8, INT12, NIBBLES_PER_INT32, IntegerFormat, NumberFormat
from qarl.quant.scales import Granularity, PerBlock, PerGroup, PerRow


@dataclass(frozen=True, slots=True)
class Quantizer:
    """A number format and which elements share a scale, which is rounded to `scale_dtype` before it is used."""

    format: NumberFormat
    granularity: Granularity
    scale_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one linear layer computes: `weight` is None for full precision, `activation` None where only the
    weights are quantized. `packed` schemes are stored with eight codes an int32, each of at most 4 bits. `narrower`
    names the same scheme in smaller groups, for matrices whose width does not fill whole groups of this one."""

    name: str
    weight: Quantizer | None
    activation: Quantizer | None
    packed: bool = False
    narrower: tuple[str, ...] = ()

    @property
    def quantized(self) -> bool:
        return self.weight is not None

    def multiple_of(self) -> int:
        """What `in_features` must be a multiple of."""
        quantizers = (quantizer for quantizer in (self.weight, self.activation) if quantizer is not None)
        return math.lcm(*(quantizer.granularity.multiple_of() for quantizer in quantizers))

    def fitted(self, shape_NK: tuple[int, int]) -> Scheme:
        """This scheme, or the first of `narrower` whose groups the input features fill; this one if none fits."""
        candidates = (self, *(SCHEMES[name] for name in self.narrower))
        return next((scheme for scheme in candidates if shape_NK[1] % scheme.multiple_of() == 0), self)

    def check_shape(self, module: str, shape_NK: tuple[int, int]) -> None:
        """Refuse, as ConfigurationError, a matrix whose input features do not fill whole groups."""
        columns = shape_NK[1]
        if columns % self.multiple_of():
            fitting = [name for name, scheme in SCHEMES.items() if columns % scheme.multiple_of() == 0]
            raise ConfigurationError(
                f"{module}: in_features {columns} is not a multiple of {self.multiple_of()}, which scheme "
                f"'{self.name}' needs; schemes that fit are {', '.join(fitting)}: take one of them as `scheme`, or "
                "for this module (and those fused with it) in [quant.rules]"
            )

    def with_scales_in(self, dtype: torch.dtype) -> Scheme:
        """This scheme for an engine whose weights have this type, in which it keeps the scales of packed codes."""
        if not self.packed or self.weight is None:
            return self
        return replace(self, weight=replace(self.weight, scale_dtype=dtype))

    def stored_bytes(self, shape_NK: tuple[int, int]) -> int:
        """Bytes of the codes and fp32 scales of one matrix as stored; full precision counts as fp32."""
        elements = shape_NK[0] * shape_NK[1]
        if self.weight is None:
            return 4 * elements
        scale_rows, scale_columns = self.weight.granularity.scale_shape(*shape_NK)
        bits = 32 // NIBBLES_PER_INT32 if self.packed else max(8, self.weight.format.bits)
        code_bytes = elements * bits // 8
        return code_bytes + 4 * scale_rows * scale_columns


def _weight_only(name: str, codes: IntegerFormat, group: int, narrower: tuple[str, ...] = ()) -> Scheme:
    return Scheme(name, Quantizer(codes, PerGroup(group)), None, packed=True, narrower=narrower)


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("none", None, None),
        Scheme("w8a8-int8", Quantizer(INT8, PerRow()), Quantizer(INT8, PerRow())),
        Scheme("w4a8-int8", Quantizer(INT4, PerRow()), Quantizer(INT8, PerRow())),
        # As precise as bf16 (steps of amax / 2047) from exact integer GEMMs: meant for the output head.
        Scheme("w12a12-int12", Quantizer(INT12, PerRow()), Quantizer(INT12, PerRow())),
        # The smaller groups serve widths such as SmolLM2-135M's 576, which is no multiple of 128.
        _weight_only("w4a16", INT4, 128, narrower=("w4a16-g64", "w4a16-g32")),
        _weight_only("w4a16-g64", INT4, 64),
        _weight_only("w4a16-g32", INT4, 32),
        _weight_only("w4a16-g16", INT4, 16),
        # For experiments: as coarse as their names say, but each code takes four bits in memory and on disk.
        _weight_only("w3a16", INT3, 128, narrower=("w3a16-g32",)),
        _weight_only("w3a16-g32", INT3, 32),
        _weight_only("w2a16", INT2, 128, narrower=("w2a16-g32",)),
        _weight_only("w2a16-g32", INT2, 32),
        Scheme("fp8", Quantizer(E4M3, PerRow()), Quantizer(E4M3, PerRow())),
        Scheme("fp8-block", Quantizer(E4M3, PerBlock(128, 128)), Quantizer(E4M3, PerGroup(128))),
    )
}


def scheme_named(name: str) -> Scheme:
    """The scheme of that name; ConfigurationError with the nearest names otherwise."""
    if name in SCHEMES:
        return SCHEMES[name]
    raise ConfigurationError(f"unknown scheme '{name}'{suggestion(name, SCHEMES)}; known: {', '.join(SCHEMES)}")
