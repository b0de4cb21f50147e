"""The operations as C kernels (`csrc/`): same names and meaning as `reference.py`, bits independent of the batch."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from qarl.ops.reference import (
    KVCodes,
    KVStore,
    PackedCodes,
    PackedInt4,
    ReferenceKernels,
    Rounding,
    Scores,
    Spans,
    shape_of,
)
from qarl.quant.formats import INT4, INT8, IntegerFormat

LARGEST_GROUP = 128
"""Largest group of 4-bit weights that share a scale, in the kernel."""

LONGEST_SUM = 65536
"""Largest K whose sums of 8-bit products, or of one plane of 16-bit codes with them, still fit int32."""


def address(tensor: Tensor | None) -> int | None:
    """Where the kernel reads; None becomes NULL."""
    if tensor is None:
        return None
    assert tensor.is_contiguous() and tensor.is_cpu, "kernels take contiguous CPU tensors"
    return tensor.data_ptr()


def as_float(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        assert tensor is None or tensor.dtype == torch.float32, "kernels compute in fp32"


def as_index(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int64, "kernels take int64 indices"


class CpuKernels(ReferenceKernels):
    """Calls into the compiled library.

    `integer_level`: 2 where 8-bit GEMMs run on AMX tiles, 1 on VNNI dot products, 0 on multiply-adds of 16-bit pairs.
    `multiplies_nibbles`: whether at level 0 GEMMs of 4-bit weights run on products of bytes instead.
    `panel` is two vectors of this CPU.
    `gain_rows`: rows whose gradients of a norm's gain are summed together.
    """

    name = "cpu"
    exact_matmul = True
    block = 64

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.integer_level = int(library.qarl_integer_level())
        self.multiplies_nibbles = bool(library.qarl_multiplies_nibbles())
        self.panel = int(library.qarl_panel_columns())
        self.gain_rows = int(library.qarl_gain_rows())

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for a result."""
        return torch.empty(shape, dtype=dtype)

    def empty_codes(self, rows: int, width: int, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
        """Memory for codes [rows, width] and a scale a row."""
        return self.empty(rows, width, dtype=dtype), self.empty(rows)

    def rms_norm(self, x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        x_TD, y = x_TD.contiguous(), self.empty(*x_TD.shape)
        as_float(x_TD, gain_D)
        width = x_TD.shape[-1]
        sizes = (x_TD.numel() // width, width)
        self.library.qarl_rms_norm(address(x_TD), address(gain_D), eps, *sizes, address(y))
        return y

    def rms_norm_quantize(self, x_TD: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        as_float(x_TD, gain_D)
        codes, scales = self.empty_codes(*x_TD.shape)
        self.library.qarl_rms_norm_quantize(
            address(x_TD), address(gain_D), eps, *x_TD.shape, address(codes), address(scales)
        )
        return codes, scales

    def quantize_rows(self, x_TK: Tensor, grid: IntegerFormat = INT8) -> tuple[Tensor, Tensor]:
        as_float(x_TK)
        rows, width = x_TK.shape
        codes, scales = self.empty_codes(rows, width, grid.code_dtype)
        wide = grid.code_dtype == torch.int16
        quantize = self.library.qarl_quantize_rows_wide if wide else self.library.qarl_quantize_rows
        quantize(address(x_TK), grid.largest, *x_TK.shape, address(codes), address(scales))
        return codes, scales

    def gated(self, gate_up_TF: Tensor) -> Tensor:
        as_float(gate_up_TF)
        rows, width = len(gate_up_TF), gate_up_TF.shape[1] // 2
        y = self.empty(rows, width)
        self.library.qarl_gated(address(gate_up_TF), rows, width, address(y))
        return y

    def gated_quantize(self, gate_up_TF: Tensor) -> tuple[Tensor, Tensor]:
        as_float(gate_up_TF)
        rows, width = len(gate_up_TF), gate_up_TF.shape[1] // 2
        codes, scales = self.empty_codes(rows, width)
        self.library.qarl_gated_quantize(address(gate_up_TF), rows, width, address(codes), address(scales))
        return codes, scales

    def rms_norm_backward(self, grad_TD: Tensor, x_TD: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        grad_TD, x_TD = grad_TD.contiguous(), x_TD.contiguous()
        as_float(grad_TD, x_TD, gain_D)
        width = x_TD.shape[-1]
        rows = x_TD.numel() // width
        grad_x, grad_gains = torch.empty_like(x_TD), torch.empty(-(-rows // self.gain_rows), width)
        inputs = map(address, (grad_TD, x_TD, gain_D))
        self.library.qarl_rms_norm_backward(*inputs, eps, rows, width, address(grad_x), address(grad_gains))
        return grad_x, grad_gains.sum(0)

    def gated_backward(self, grad_TF: Tensor, gate_up: Tensor) -> Tensor:
        as_float(grad_TF, gate_up)
        grad = torch.empty_like(gate_up)
        self.library.qarl_gated_backward(address(grad_TF), address(gate_up), *grad_TF.shape, address(grad))
        return grad

    def pack_codes(self, codes_NK: Tensor, grid: IntegerFormat = INT8) -> PackedCodes:
        """Panels of 16 columns by groups of 4 along K; 4-bit codes two to a byte."""
        n, k = codes_NK.shape
        rows, width = round_up(n, self.block), round_up(k, 64)
        if codes_NK.dtype == torch.int16:
            packed = torch.empty(rows // self.block, self.block * width, dtype=torch.int16)
            self.library.qarl_pack_int12(self.integer_level, address(codes_NK), n, k, address(packed))
            return PackedCodes((n, k), torch.int16, packed)
        corrections = torch.empty(rows // self.block, self.block, dtype=torch.int32)
        if grid is INT4:
            packed = torch.empty(rows // self.block, self.block * width // 2, dtype=torch.uint8)
            pack = self.library.qarl_pack_nibbles
        else:
            packed = torch.empty(rows // self.block, self.block * width, dtype=torch.int8)
            pack = self.library.qarl_pack_int8
        pack(address(codes_NK), n, k, address(packed), address(corrections))
        return PackedCodes((n, k), torch.int8, packed, corrections)

    def unpack_codes(self, weight: PackedCodes) -> Tensor:
        codes = torch.empty(weight.shape, dtype=weight.dtype)
        rest = (address(weight.packed), *weight.shape, address(codes))
        if weight.dtype == torch.int16:
            self.library.qarl_unpack_int12(self.integer_level, *rest)
        else:
            self.library.qarl_unpack_int8(weight.packed.dtype == torch.uint8, *rest)
        return codes

    def changed_codes(self, before: PackedCodes, after: PackedCodes) -> int:
        if before.dtype == torch.int8:
            return self._count_changed(before.packed, after.packed, 4 if after.packed.dtype == torch.uint8 else 8)
        if self.integer_level < 2:
            return self._count_changed(before.packed, after.packed, 16)
        panels = (before.packed.view(4 * len(before.packed), -1), after.packed.view(4 * len(after.packed), -1))
        return self._count_changed(*panels, 8, planes=True)

    def changed_int4(self, before: PackedInt4, after: PackedInt4) -> int:
        return self._count_changed(before.nibbles, after.nibbles, 4)

    def _count_changed(self, before: Tensor, after: Tensor, bits: int, planes: bool = False) -> int:
        assert before.shape == after.shape and before.dtype == after.dtype
        changed, blocks = torch.empty(1, dtype=torch.int64), len(after)
        sizes = (blocks, after.nbytes // blocks, bits, planes)
        self.library.qarl_count_changed(address(before), address(after), *sizes, address(changed))
        return int(changed)

    def integer_matmul(
        self,
        codes_TK: Tensor,
        row_scales_T: Tensor,
        weight: PackedCodes,
        column_scales_N: Tensor,
        bias_N: Tensor | None,
        residual_TN: Tensor | None,
    ) -> Tensor:
        """The GEMM and its epilogue in one pass."""
        as_float(row_scales_T, column_scales_N, bias_N, residual_TN)
        (rows, k), n = codes_TK.shape, weight.shape[0]
        assert codes_TK.dtype == weight.dtype and weight.shape[1] == k <= LONGEST_SUM
        y = self.empty(rows, n)
        left = map(address, (codes_TK, row_scales_T, weight.packed))
        rest = (*map(address, (column_scales_N, bias_N, residual_TN)), rows, n, k, address(y))
        if codes_TK.dtype == torch.int16:
            self.library.qarl_int12_matmul(self.integer_level, *left, *rest)
        else:
            nibbles = weight.packed.dtype == torch.uint8
            self.library.qarl_int8_matmul(self.integer_level, nibbles, *left, address(weight.corrections), *rest)
        return y

    def grad_rows(self, grad_TN: Tensor, weight: PackedCodes, scales_N: Tensor, rounding: Rounding) -> Tensor:
        """The weight's scales go into the gradient, which is rounded a token and meets the codes exactly."""
        if weight.dtype != torch.int8:
            return super().grad_rows(grad_TN, weight, scales_N, rounding)
        codes, scales = self._gradient_codes("rows", grad_TN, scales_N, rounding)
        grad = torch.empty(len(grad_TN), weight.shape[1])
        self._gradient_matmul(codes, scales, self._transposed(self.unpack_codes(weight), rounding.grid), None, grad)
        return grad

    def add_grad_weight(
        self,
        grad_TN: Tensor,
        codes_TK: Tensor,
        row_scales_T: Tensor,
        weights: Sequence[Tensor],
        rounding: Rounding,
    ) -> None:
        """The activations' scales go into the gradient, which is rounded a column and meets the codes exactly."""
        if codes_TK.dtype != torch.int8:
            super().add_grad_weight(grad_TN, codes_TK, row_scales_T, weights, rounding)
            return
        codes, scales = self._gradient_codes("columns", grad_TN, row_scales_T, rounding)
        packed, heights = self._transposed(codes_TK, rounding.grid), list(map(len, weights))
        for weight, rows, factors in zip(weights, codes.split(heights), scales.split(heights), strict=True):
            self._gradient_matmul(rows, factors, packed, weight, weight)

    def _gradient_codes(
        self, by: Literal["rows", "columns"], x_TN: Tensor, factors: Tensor, rounding: Rounding
    ) -> tuple[Tensor, Tensor]:
        """Codes of x times a factor a column, [T, N] by rows; or times a factor a row, [N, T] by columns."""
        as_float(x_TN, factors)
        (rows, n), grid = x_TN.shape, rounding.grid
        shape = (rows, n) if by == "rows" else (n, rows)
        codes, scales = self.empty_codes(*shape, grid.code_dtype)
        quantize = getattr(self.library, f"qarl_quantize_scaled_{by}")
        how = (grid.largest, codes.element_size(), rounding.seed)
        quantize(address(x_TN), address(factors), *how, rows, n, address(codes), address(scales))
        return codes, scales

    def _transposed(self, codes_KN: Tensor, left: IntegerFormat) -> PackedCodes:
        """The transpose of int8 codes, packed to be multiplied by codes of the grid `left` from their left."""
        k, n = codes_KN.shape
        rows, width = round_up(n, self.block), round_up(k, 64)
        packed = torch.empty(rows // self.block, self.block * width, dtype=torch.int8)
        corrections = torch.empty(rows // self.block, self.block, dtype=torch.int32) if left is INT8 else None
        self.library.qarl_pack_int8_transposed(address(codes_KN), n, k, address(packed), address(corrections))
        return PackedCodes((n, k), torch.int8, packed, corrections)

    def _gradient_matmul(
        self, codes_MK: Tensor, scales_M: Tensor, right: PackedCodes, added_MN: Tensor | None, out_MN: Tensor
    ) -> None:
        """out = (codes * scale) @ right^T, summed as integers, plus `added`, which may be `out` itself."""
        (rows, k), n = codes_MK.shape, right.shape[0]
        as_float(scales_M, added_MN, out_MN)
        assert right.shape[1] == k <= LONGEST_SUM and out_MN.shape == (rows, n)
        left, rest = map(address, (codes_MK, scales_M, right.packed)), (rows, n, k, address(out_MN))
        if codes_MK.dtype == torch.int16:
            self.library.qarl_mixed_matmul(self.integer_level, *left, address(added_MN), *rest)
        else:
            epilogue = map(address, (right.corrections, None, None, added_MN))
            self.library.qarl_int8_matmul(self.integer_level, False, *left, *epilogue, *rest)

    def pack(self, weight_NK: Tensor) -> Tensor:
        """Panels [ceil(N / panel), K, panel]: the columns of one are neighbours, so a row of x meets vectors."""
        as_float(weight_NK)
        n, k = weight_NK.shape
        packed = weight_NK.new_empty(-(-n // self.panel), k, self.panel)
        self.library.qarl_pack_panels(address(weight_NK.contiguous()), n, k, address(packed))
        return packed

    def unpack(self, packed: Tensor, n: int) -> Tensor:
        return packed.transpose(1, 2).flatten(0, 1)[:n]

    def matmul(self, x_TK: Tensor, packed: Tensor, n: int, bias_N: Tensor | None, residual_TN: Tensor | None) -> Tensor:
        as_float(x_TK, packed, bias_N, residual_TN)
        rows, k = x_TK.shape
        assert packed.shape[1] == k, "packed weight and input disagree on K"
        y = self.empty(rows, n)
        self.library.qarl_matmul(*map(address, (x_TK, packed, bias_N, residual_TN)), rows, n, k, address(y))
        return y

    def add_low_rank_(self, y_TN: Tensor, x_TK: Tensor, a: Tensor, b: Tensor, siblings_S3: Tensor) -> Tensor:
        """Both products in one pass, `y_TN` overwritten."""
        as_float(y_TN, x_TK, a, b)
        as_index(siblings_S3)
        (rows, k), (panels, rank, _) = x_TK.shape, b.shape
        ranks, n = len(siblings_S3) * rank, y_TN.shape[1]
        assert a.shape[1] == k and len(y_TN) == rows, "adapter, input and output disagree"
        inner = self.empty(rows, ranks)
        inputs, outputs = map(address, (x_TK, a, b, siblings_S3)), map(address, (inner, y_TN))
        self.library.qarl_add_low_rank(*inputs, rows, k, ranks, rank, panels, n, *outputs)
        return y_TN

    def pack_int4(self, codes_NK: Tensor, scales_NG: Tensor) -> PackedInt4:
        """Nibbles in the panels of `pack`, and the scales beside them."""
        as_float(scales_NG)
        (n, k), groups = codes_NK.shape, scales_NG.shape[1]
        assert codes_NK.dtype == torch.int8 and k // groups <= LARGEST_GROUP
        panels = -(-n // self.panel)
        nibbles = torch.empty(panels, k, self.panel // 2, dtype=torch.uint8)
        scales = torch.empty(panels, groups, self.panel)
        self.library.qarl_pack_int4(
            *map(address, (codes_NK, scales_NG)), n, k, k // groups, *map(address, (nibbles, scales))
        )
        return PackedInt4((n, k), scales_NG, nibbles, scales)

    def unpack_int4(self, weight: PackedInt4) -> Tensor:
        codes = torch.empty(weight.shape, dtype=torch.int8)
        self.library.qarl_unpack_int4(address(weight.nibbles), *weight.shape, address(codes))
        return codes

    def matmul_int4(
        self, x_TK: Tensor, weight: PackedInt4, bias_N: Tensor | None, residual_TN: Tensor | None
    ) -> Tensor:
        assert weight.panel_scales is not None
        as_float(x_TK, bias_N, residual_TN)
        (rows, k), n = x_TK.shape, weight.shape[0]
        assert weight.shape[1] == k, "packed weight and input disagree on K"
        y = self.empty(rows, n)
        inputs = map(address, (x_TK, weight.nibbles, weight.panel_scales, bias_N, residual_TN))
        self.library.qarl_matmul_int4(*inputs, rows, n, k, k // weight.scales.shape[1], address(y))
        return y

    def split_rotate(
        self,
        qkv_TN: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        cosines_PC: Tensor,
        sines_PC: Tensor,
        gains: tuple[Tensor, Tensor] | None,
        eps: float,
        heads: int,
        keys: KVStore,
        values: KVStore,
    ) -> Tensor:
        q_gain, k_gain = gains if gains is not None else (None, None)
        as_float(qkv_TN, cosines_PC, sines_PC, q_gain, k_gain)
        as_index(positions_T, slots_T)
        rows, (_, kv_heads, dim) = len(qkv_TN), shape_of(keys)
        q = self.empty(rows, heads, dim)
        inputs = map(address, (qkv_TN, positions_T, slots_T, cosines_PC, sines_PC, q_gain, k_gain, q))
        stores = (*store_addresses(keys), *store_addresses(values), *store_steps(keys, values))
        self.library.qarl_split_rotate(*inputs, *stores, eps, rows, heads, kv_heads, dim)
        return q

    def attention(
        self, q_THC: Tensor, keys: KVStore, values: KVStore, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor]:
        as_float(q_THC)
        (rows, heads, dim), (_, kv_heads, _) = q_THC.shape, shape_of(keys)
        out, lse = self.empty(rows, heads, dim), self.empty(rows, heads)
        stores = (*store_addresses(keys), *store_addresses(values), *store_steps(keys, values))
        rest = map(address, (*layout(spans), out, lse))
        sizes = (rows, heads, kv_heads, dim, spans.longest)
        self.library.qarl_attention(address(q_THC), *stores, *rest, scale, *sizes)
        return out, lse

    def attention_backward(
        self,
        grad_THC: Tensor,
        q_THC: Tensor,
        keys_RGC: Tensor,
        values_RGC: Tensor,
        out_THC: Tensor,
        lse_TH: Tensor,
        spans: Spans,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        as_float(grad_THC, q_THC, keys_RGC, values_RGC, out_THC, lse_TH)
        as_index(spans.families)
        (_, heads, dim), kv_heads = q_THC.shape, keys_RGC.shape[1]
        dq, dk, dv = torch.empty_like(q_THC), torch.zeros_like(keys_RGC), torch.zeros_like(values_RGC)
        inputs = (grad_THC, q_THC, keys_RGC, values_RGC, out_THC, lse_TH, *layout(spans), spans.families, dq, dk, dv)
        sizes = (len(spans.families) - 1, heads, kv_heads, dim, spans.longest)
        self.library.qarl_attention_backward(*map(address, inputs), scale, *sizes)
        return dq, dk, dv

    def split_rotate_backward(
        self,
        dq_THC: Tensor,
        dk_TGC: Tensor,
        dv_TGC: Tensor,
        positions_T: Tensor,
        cosines_PC: Tensor,
        sines_PC: Tensor,
    ) -> Tensor:
        as_float(dq_THC, dk_TGC, dv_TGC, cosines_PC, sines_PC)
        as_index(positions_T)
        (rows, heads, dim), kv_heads = dq_THC.shape, dk_TGC.shape[1]
        grad = torch.empty(rows, (heads + 2 * kv_heads) * dim)
        inputs = (dq_THC, dk_TGC, dv_TGC, positions_T, cosines_PC, sines_PC)
        self.library.qarl_split_rotate_backward(*map(address, inputs), rows, heads, kv_heads, dim, address(grad))
        return grad

    def token_logprobs(self, logits_TV: Tensor, targets_T: Tensor, inverse_temperature: float) -> Scores:
        as_float(logits_TV)
        as_index(targets_T)
        scores = Scores(*(self.empty(len(logits_TV)) for _ in range(4)))
        outputs = map(address, (scores.logprobs, scores.shifts, scores.sums, scores.entropies))
        self.library.qarl_token_logprobs(
            address(logits_TV),
            address(targets_T),
            inverse_temperature,
            *logits_TV.shape,
            *outputs,
        )
        return scores

    def logits_gradient_(
        self,
        logits_TV: Tensor,
        targets_T: Tensor,
        scores: Scores,
        grad_T: Tensor,
        grad_entropy_T: Tensor | None,
        inverse_temperature: float,
    ) -> Tensor:
        as_float(logits_TV, grad_T, grad_entropy_T, *scores)
        as_index(targets_T)
        inputs = (logits_TV, targets_T, scores.shifts, scores.sums, scores.entropies, grad_T, grad_entropy_T)
        self.library.qarl_logits_gradient(*map(address, inputs), inverse_temperature, *logits_TV.shape)
        return logits_TV

    def sample(self, logits_TV: Tensor, uniforms_T: Tensor, inverse_temperature: float) -> tuple[Tensor, Tensor]:
        as_float(logits_TV, uniforms_T)
        tokens, logprobs = self.empty(len(logits_TV), dtype=torch.int64), self.empty(len(logits_TV))
        inputs = map(address, (logits_TV, uniforms_T))
        self.library.qarl_sample(*inputs, inverse_temperature, *logits_TV.shape, address(tokens), address(logprobs))
        return tokens, logprobs

    def chunk_sums(self, words_CW: Tensor, multipliers_W: Tensor) -> Tensor:
        as_index(words_CW, multipliers_W)
        sums = torch.empty(2, len(words_CW), dtype=torch.int64)
        self.library.qarl_chunk_sums(address(words_CW), address(multipliers_W), *words_CW.shape, address(sums))
        return sums


def store_addresses(store: KVStore) -> tuple[int | None, int | None, int | None]:
    """fp32 values, codes, scales: what the store lacks is NULL."""
    if isinstance(store, KVCodes):
        as_float(store.scales)
        assert store.codes.dtype == torch.int8
        return None, store.codes.data_ptr(), store.scales.data_ptr()
    as_float(store)
    return store.data_ptr(), None, None


def store_steps(*stores: KVStore) -> tuple[int, int]:
    """From one row, and from one head, to the next, in vectors of a head; the same for all these stores."""
    steps = set()
    for store in stores:
        row, head, element = (store.codes if isinstance(store, KVCodes) else store).stride()
        dim = shape_of(store)[2]
        assert element == 1 and row % dim == head % dim == 0, "a head's vector is contiguous"
        steps.add((row // dim, head // dim))
        assert not isinstance(store, KVCodes) or store.scales.stride() == (row // dim, head // dim)
    (found,) = steps
    return found


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def layout(spans: Spans) -> tuple[Tensor, ...]:
    parts = (spans.sequences, spans.visible, spans.pointers, spans.starts, spans.lengths)
    as_index(*parts)
    return parts
