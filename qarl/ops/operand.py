"""A published weight in the form its GEMM multiplies: integer codes and scales, or packed floats.

Shape letters: T rows, K in, N out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.ops.cpu import LARGEST_GROUP, CpuKernels
from qarl.ops.kernels import kernels, require_exact_integers
from qarl.ops.reference import PackedCodes, PackedInt4, Rounding, blocks
from qarl.quant.formats import INT4, IntegerFormat
from qarl.quant.qtensor import (
    QTensor,
    dequantize,
    dequantize_activations,
    quantize,
    quantize_activations,
)
from qarl.quant.scales import PerBlock, PerGroup, PerRow
from qarl.quant.scheme import Quantizer, Scheme

Rows = tuple[Tensor, Tensor | None]
"""What a GEMM reads: codes [T, K] with scales [T], or plain fp32 rows [T, K] with None."""

SMALLEST_GROUP = 32
"""Of 4-bit weights that share a scale: the Triton kernel multiplies half a group at a time, 16 products at least."""

COLUMNS = 64
"""Packed layouts can be cut at multiples of this many output columns."""


class FloatBackward(ABC):
    """The straight-through gradient of a product, in fp32, on the values that the codes stand for."""

    __slots__ = ()

    @abstractmethod
    def dense(self, master: Tensor | None = None) -> Tensor:
        """The weight as multiplied, fp32 [N, K]."""

    @abstractmethod
    def rows_as_float(self, rows: Rows) -> Tensor:
        """The activations as multiplied, fp32 [T, K]."""

    def grad_rows(self, grad_TN: Tensor, rounding: Rounding | None) -> Tensor:
        """Gradient of rows [T, K]; `rounding` is for those that multiply codes by it."""
        return grad_TN @ self.dense()

    def add_grad_weight(
        self, grad_TN: Tensor, rows: Rows, weights: Sequence[Tensor], rounding: Rounding | None
    ) -> None:
        """Add the gradient of the weight to `weights`, its parts [n, K]."""
        rows_TK = self.rows_as_float(rows)
        for weight, grad in zip(weights, grad_TN.split([len(weight) for weight in weights], 1), strict=True):
            weight.addmm_(grad.t(), rows_TK)


@dataclass(frozen=True, slots=True, eq=False)
class IntegerOperand(FloatBackward):
    """Integer codes on both sides, summed exactly; `scales` [N], activations per token on the grid `rows_grid`.

    4-bit codes are packed two to a byte, and multiplied as int8.
    """

    weight: PackedCodes
    scales: Tensor
    bias: Tensor | None
    rows_grid: IntegerFormat

    quantizes_rows = True
    is_kernels_alone = True

    def codes(self, some: range | None = None) -> Tensor:
        """[N, K], or some of its rows, read back from what is multiplied."""
        whole, offset = whole_blocks(some or range(self.height), kernels().block)
        return kernels().unpack_codes(self.weight.outputs(whole, kernels().block))[offset:]

    @property
    def num_codes(self) -> int:
        return self.weight.shape[0] * self.weight.shape[1]

    def codes_changed(self, before: Operand) -> int:
        """How many codes differ from those of the version before."""
        assert isinstance(before, IntegerOperand)
        return kernels().changed_codes(before.weight, self.weight)

    def product(self, rows: Rows, residual_TN: Tensor | None) -> Tensor:
        codes_TK, scales_T = rows
        assert scales_T is not None
        return kernels().integer_matmul(codes_TK, scales_T, self.weight, self.scales, self.bias, residual_TN)

    @property
    def height(self) -> int:
        """N"""
        return self.weight.shape[0]

    def outputs(self, some: range) -> IntegerOperand:
        """The operand of these columns of the product alone, without a copy; `some` starts at a multiple of COLUMNS."""
        at = slice(some.start, some.stop)
        weight = self.weight.outputs(some, kernels().block)
        return IntegerOperand(weight, self.scales[at], part_of(self.bias, at), self.rows_grid)

    def dense(self, master: Tensor | None = None) -> Tensor:
        """The weight that the codes stand for, fp32 [N, K]; `master` is not it."""
        return self.codes().float() * self.scales[:, None]

    def rows_as_float(self, rows: Rows) -> Tensor:
        """The activations that the GEMM really multiplied, fp32 [T, K]."""
        codes_TK, scales_T = rows
        assert scales_T is not None
        return codes_TK.float() * scales_T[:, None]

    def grad_rows(self, grad_TN: Tensor, rounding: Rounding | None) -> Tensor:
        """Straight-through gradient of rows [T, K], on the codes themselves if the gradient may be rounded."""
        if rounding is None:
            return grad_TN @ self.dense()
        return kernels().grad_rows(grad_TN, self.weight, self.scales, rounding)

    def add_grad_weight(
        self, grad_TN: Tensor, rows: Rows, weights: Sequence[Tensor], rounding: Rounding | None
    ) -> None:
        """Add the straight-through gradient of the weight to `weights`, its parts [n, K]; rounding as above."""
        codes_TK, scales_T = rows
        assert scales_T is not None
        if rounding is None:
            FloatBackward.add_grad_weight(self, grad_TN, rows, weights, None)
        else:
            kernels().add_grad_weight(grad_TN, codes_TK, scales_T, weights, rounding)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Operand(FloatBackward):
    """Weights of at most 4 bits with group scales times fp32 activations: expanded on the way through a fixed-order
    fp32 GEMM.
    """

    weight: PackedInt4
    bias: Tensor | None

    quantizes_rows = False
    is_kernels_alone = True
    rows_grid = None

    def product(self, rows: Rows, residual_TN: Tensor | None) -> Tensor:
        return kernels().matmul_int4(rows[0], self.weight, self.bias, residual_TN)

    def codes(self, some: range | None = None) -> Tensor:
        """[N, K], or some of its rows, read back from what is multiplied."""
        whole, offset = whole_blocks(some or range(self.height), kernels().panel)
        return kernels().unpack_int4(self.weight.outputs(whole, kernels().panel))[offset:]

    @property
    def num_codes(self) -> int:
        return self.weight.shape[0] * self.weight.shape[1]

    def codes_changed(self, before: Operand) -> int:
        """How many codes differ from those of the version before."""
        assert isinstance(before, Int4Operand)
        return kernels().changed_int4(before.weight, self.weight)

    @property
    def height(self) -> int:
        """N"""
        return self.weight.shape[0]

    def outputs(self, some: range) -> Int4Operand:
        """The operand of these columns of the product alone, without a copy; `some` starts at a multiple of COLUMNS."""
        at = slice(some.start, some.stop)
        return Int4Operand(self.weight.outputs(some, kernels().panel), part_of(self.bias, at))

    def dense(self, master: Tensor | None = None) -> Tensor:
        """The weight that the codes stand for, fp32 [N, K]; `master` is not it."""
        return kernels().dense_int4(self.weight)

    def rows_as_float(self, rows: Rows) -> Tensor:
        return rows[0]


@dataclass(frozen=True, slots=True, eq=False)
class FloatOperand(FloatBackward):
    """fp32 GEMM in a fixed order on packed weights: full precision, and the reference of fp8.

    For fp8 the activations are rounded to their grid first (`activation`), then multiplied as the fp32
    values their codes stand for; so are weights alone whose groups no kernel takes. `quantized` are the weight's codes
    [N, K], None of an unquantized master.
    """

    packed: Tensor
    shape: tuple[int, int]
    bias: Tensor | None
    quantized: Tensor | None = None
    activation: Quantizer | None = None

    quantizes_rows = False
    rows_grid = None

    @property
    def is_kernels_alone(self) -> bool:
        """Whether a product is calls of kernels and nothing else, so that a graph can record it."""
        return self.activation is None

    def product(self, rows: Rows, residual_TN: Tensor | None) -> Tensor:
        x_TK = self.rows_as_float(rows)
        return kernels().matmul(x_TK, self.packed, self.shape[0], self.bias, residual_TN)

    @property
    def height(self) -> int:
        """N"""
        return self.shape[0]

    def outputs(self, some: range) -> FloatOperand:
        """The operand of these columns of the product alone, without a copy; `some` starts at a multiple of COLUMNS."""
        packed, bias = self.packed[blocks(some, kernels().panel)], part_of(self.bias, slice(some.start, some.stop))
        codes = None if self.quantized is None else self.quantized[some.start : some.stop]
        return FloatOperand(packed, (len(some), self.shape[1]), bias, codes, self.activation)

    def codes(self, some: range | None = None) -> Tensor:
        """[N, K], or some of its rows."""
        assert self.quantized is not None, "full precision has no codes"
        return self.quantized if some is None else self.quantized[some.start : some.stop]

    @property
    def num_codes(self) -> int:
        return 0 if self.quantized is None else self.quantized.numel()

    def codes_changed(self, before: Operand) -> int:
        """How many codes differ from those of the version before."""
        assert isinstance(before, FloatOperand)
        # Compared as bytes, since 8-bit floats cannot be.
        return int(torch.count_nonzero(self.codes().view(torch.uint8) != before.codes().view(torch.uint8)))

    def dense(self, master: Tensor | None = None) -> Tensor:
        """The weight as multiplied; in full precision that is `master`, where the caller has it, without a copy."""
        if master is not None and self.quantized is None:
            return master.detach()[: self.shape[0]]
        return kernels().unpack(self.packed, self.shape[0])

    def rows_as_float(self, rows: Rows) -> Tensor:
        x_TK, _ = rows
        if self.activation is None:
            return x_TK
        return dequantize_activations(*quantize_activations(x_TK, self.activation), self.activation)


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Operand(FloatBackward):
    """E4M3 codes on both sides, multiplied as they are; `weight` [N, K] with scales [N, G] for G groups along K."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None
    activation: Quantizer

    quantizes_rows = False
    is_kernels_alone = False
    rows_grid = None

    def product(self, rows: Rows, residual_TN: Tensor | None) -> Tensor:
        codes_TK, scales_TG = quantize_activations(rows[0], self.activation)
        return kernels().fp8_matmul(codes_TK, scales_TG, self.weight, self.scales, self.bias, residual_TN)

    @property
    def height(self) -> int:
        """N"""
        return len(self.weight)

    def outputs(self, some: range) -> Fp8Operand:
        """The operand of these columns of the product alone, without a copy; `some` starts at a multiple of COLUMNS."""
        at = slice(some.start, some.stop)
        return Fp8Operand(self.weight[at], self.scales[at], part_of(self.bias, at), self.activation)

    def codes(self, some: range | None = None) -> Tensor:
        """[N, K], or some of its rows."""
        return self.weight if some is None else self.weight[some.start : some.stop]

    @property
    def num_codes(self) -> int:
        return self.weight.numel()

    def codes_changed(self, before: Operand) -> int:
        """How many codes differ from those of the version before."""
        assert isinstance(before, Fp8Operand)
        return int(torch.count_nonzero(self.weight.view(torch.uint8) != before.weight.view(torch.uint8)))

    def dense(self, master: Tensor | None = None) -> Tensor:
        """The weight that the codes stand for, fp32 [N, K]; `master` is not it."""
        groups_NGE = self.weight.float().unflatten(1, (self.scales.shape[1], -1))
        dense: Tensor = (groups_NGE * self.scales[..., None]).flatten(1)
        return dense

    def rows_as_float(self, rows: Rows) -> Tensor:
        """The activations that the GEMM really multiplied, fp32 [T, K]."""
        return dequantize_activations(*quantize_activations(rows[0], self.activation), self.activation)


Operand = IntegerOperand | Int4Operand | FloatOperand | Fp8Operand


def rounds_gradients(operand: Operand) -> bool:
    """Whether its backward pass can multiply codes by a rounded gradient."""
    is_bytes = isinstance(operand, IntegerOperand) and operand.weight.dtype == torch.int8
    return is_bytes and isinstance(kernels(), CpuKernels)


def quantize_weight(weight_NK: Tensor, scheme: Scheme, name: str) -> QTensor:
    """`quant.quantize`, through the fast kernel where the scheme is integer codes with one scale a row."""
    weight, fast = scheme.weight, kernels()
    if weight is None or not isinstance(weight.format, IntegerFormat) or not isinstance(weight.granularity, PerRow):
        return quantize(weight_NK, scheme, name)
    if not isinstance(fast, CpuKernels):
        return quantize(weight_NK, scheme, name)
    codes, scales = fast.quantize_rows(weight_NK.contiguous(), weight.format)
    if not bool(scales.isfinite().all()):
        return quantize(weight_NK, scheme, name)  # raises, naming the tensor and the row
    return QTensor(codes, scales[:, None], scheme)


def operand_of(parts: Sequence[QTensor | Tensor], biases: Sequence[Tensor | None]) -> Operand:
    """One operand from sibling matrices that read the same input, stacked along N; all of one scheme.

    RunError for integer codes where the integer GEMM is not exact.
    """
    bias = stack_biases([len(p.codes) if isinstance(p, QTensor) else len(p) for p in parts], biases)
    first = parts[0]
    if isinstance(first, Tensor):
        weight = stack([p for p in parts if isinstance(p, Tensor)])
        return FloatOperand(kernels().pack(weight), (len(weight), weight.shape[1]), bias)
    quantized = [p for p in parts if isinstance(p, QTensor)]
    assert len(quantized) == len(parts) and all(p.scheme is first.scheme for p in quantized)
    if is_integer(first.scheme):
        require_exact_integers()
        packed = kernels().pack_codes(stack([p.codes for p in quantized]), weight_grid(first.scheme))
        return IntegerOperand(packed, stack([p.scale[:, 0] for p in quantized]), bias, activation_grid(first.scheme))
    if is_weight_only_int4(first.scheme):
        codes, scales = stack([p.codes for p in quantized]), stack([p.scale for p in quantized])
        return Int4Operand(kernels().pack_int4(codes, scales), bias)
    codes, activation = stack([p.codes for p in quantized]), first.scheme.activation
    if kernels().multiplies_fp8 and activation is not None and codes.dtype == torch.float8_e4m3fn:
        return Fp8Operand(codes, stack([row_scales(p) for p in quantized]), bias, activation)
    weight = stack([dequantize(p) for p in quantized])
    shape = (len(weight), weight.shape[1])
    return FloatOperand(kernels().pack(weight), shape, bias, codes, activation)


def row_scales(quantized: QTensor) -> Tensor:
    """The scales [N, G] of every row's groups along K, of a scheme with one scale a row or a block."""
    assert quantized.scheme.weight is not None
    granularity = quantized.scheme.weight.granularity
    height = granularity.rows if isinstance(granularity, PerBlock) else 1
    return quantized.scale.repeat_interleave(height, 0)[: len(quantized.codes)]


def is_integer(scheme: Scheme) -> bool:
    """Whether weight and activations are integer codes with one scale a row: the exact GEMM serves it."""
    return all(
        q is not None and isinstance(q.granularity, PerRow) and isinstance(q.format, IntegerFormat)
        for q in (scheme.weight, scheme.activation)
    )


def is_weight_only_int4(scheme: Scheme) -> bool:
    """Whether codes of at most 4 bits, in groups along K that the kernels take, meet full-precision activations."""
    weight = scheme.weight
    return (
        weight is not None
        and weight.format.bits <= INT4.bits
        and isinstance(weight.granularity, PerGroup)
        and SMALLEST_GROUP <= weight.granularity.size <= LARGEST_GROUP
        and scheme.activation is None
    )


def weight_grid(scheme: Scheme) -> IntegerFormat:
    """The grid of an integer scheme's weights."""
    assert scheme.weight is not None and isinstance(scheme.weight.format, IntegerFormat)
    return scheme.weight.format


def activation_grid(scheme: Scheme) -> IntegerFormat:
    """The grid of an integer scheme's activations."""
    assert scheme.activation is not None and isinstance(scheme.activation.format, IntegerFormat)
    return scheme.activation.format


def whole_blocks(some: range, size: int) -> tuple[range, int]:
    """These rows and those before them in their first one's block, and how many these are."""
    start = some.start // size * size
    return range(start, some.stop), some.start - start


def part_of(bias: Tensor | None, at: slice) -> Tensor | None:
    return None if bias is None else bias[at]


def stack(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))


def stack_biases(heights: Sequence[int], biases: Sequence[Tensor | None]) -> Tensor | None:
    """Biases of siblings as one vector; a sibling without one contributes zeros."""
    given = [bias for bias in biases if bias is not None]
    if not given:
        return None
    parts = [given[0].new_zeros(n) if b is None else b.detach() for n, b in zip(heights, biases, strict=True)]
    return torch.cat(parts)
