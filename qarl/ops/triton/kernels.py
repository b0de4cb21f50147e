"""The operations as Triton kernels: same names and meaning as `reference.py`, bits independent of the batch.

Backward GEMMs, the layout of weights and sums over weights are those of the reference: plain torch, on any device.
Shape letters as there.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from qarl.ops.cpu import as_float, as_index, layout, store_steps
from qarl.ops.reference import (
    KVCodes,
    KVStore,
    PackedCodes,
    PackedInt4,
    ReferenceKernels,
    Scores,
    Spans,
    shape_of,
)
from qarl.ops.triton import attention, gemm, head, rows
from qarl.quant.formats import INT8, IntegerFormat

LONGEST_BLOCK = 2048
"""Most numbers of a row that a program holds at a time."""

LONGEST_SUM = 1 << 17
"""Largest K whose sums of products fit int32."""

ALIGNMENT = 16
"""Bytes. Triton compiles a kernel anew for pointers that are no such multiple, perhaps with sums in another order."""

PLAIN = {"enable_fp_fusion": False}
"""For every kernel: no fused multiply-adds, so that the compiler's choices cannot change a bit."""


class TritonKernels(ReferenceKernels):
    """Kernels for tensors on `device`; on the CPU in Triton's interpreter (TRITON_INTERPRET=1), far too slow to train.

    `precision` of fp32 matrix products: three tf32 products for one, about as exact as fp32.
    """

    name = "triton"
    exact_matmul = True
    precision = "tf32x3"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Tensor cores know E4M3 since compute capability 8.9.
        self.multiplies_fp8 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)

    def rms_norm(self, x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        return self._prepare("norm", x_TD, gain_D, eps)

    def rms_norm_quantize(self, x_TD: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._prepare_quantized("norm", x_TD, gain_D, eps, INT8)

    def quantize_rows(self, x_TK: Tensor, grid: IntegerFormat = INT8) -> tuple[Tensor, Tensor]:
        """As defined, but a row that is not finite gets scale NaN rather than an error: nothing waits for the GPU."""
        return self._prepare_quantized("plain", x_TK, None, 0.0, grid)

    def add_low_rank_(self, y_TN: Tensor, x_TK: Tensor, a: Tensor, b: Tensor, siblings_S3: Tensor) -> Tensor:
        siblings = siblings_S3.tolist()
        rank = b.shape[1]
        inner_TR = self.matmul(x_TK, a, rank * len(siblings), None, None)
        parts = b.split([-(-height // self.panel) for _, height, _ in siblings])
        for part, (column, height, first) in zip(parts, siblings, strict=True):
            own = y_TN[:, column : column + height]
            inner = inner_TR[:, first : first + rank].contiguous()
            own.copy_(self.matmul(inner, part, height, None, own.contiguous()))
        return y_TN

    def gated(self, gate_up_TF: Tensor) -> Tensor:
        return self._prepare("gated", gate_up_TF, None, 0.0)

    def gated_quantize(self, gate_up_TF: Tensor) -> tuple[Tensor, Tensor]:
        return self._prepare_quantized("gated", gate_up_TF, None, 0.0, INT8)

    def _prepare(self, prologue: str, x: Tensor, gain: Tensor | None, eps: float) -> Tensor:
        as_float(x, gain)
        step = x.shape[-1]
        n = step // 2 if prologue == "gated" else step
        y = x.new_empty((*x.shape[:-1], n))
        given = (whole(x), whole(gain), y, eps, n, step)
        rows.prepare_kernel[(x.numel() // step,)](*given, PROLOGUE=prologue, BLOCK=block_of(n), **PLAIN)
        return y

    def _prepare_quantized(
        self, prologue: str, x_TK: Tensor, gain: Tensor | None, eps: float, grid: IntegerFormat
    ) -> tuple[Tensor, Tensor]:
        as_float(x_TK, gain)
        height, step = x_TK.shape
        n = step // 2 if prologue == "gated" else step
        codes, scales = x_TK.new_empty((height, n), dtype=grid.code_dtype), x_TK.new_empty(height)
        rows.prepare_quantized_kernel[(height,)](
            whole(x_TK), whole(gain), codes, scales, eps, grid.largest, n, step,
            PROLOGUE=prologue, BLOCK=block_of(n), **PLAIN,
        )  # fmt: skip
        return codes, scales

    def rms_norm_backward(self, grad_TD: Tensor, x_TD: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        as_float(grad_TD, x_TD, gain_D)
        n = x_TD.shape[-1]
        grad_x, inverses = x_TD.new_empty(x_TD.shape), x_TD.new_empty(x_TD.shape[:-1])
        given = (*map(whole, (grad_TD, x_TD, gain_D)), grad_x, inverses, eps, n)
        rows.rms_norm_backward_kernel[(inverses.numel(),)](*given, BLOCK=block_of(n), **PLAIN)
        return grad_x, (grad_TD * x_TD * inverses[..., None]).flatten(0, -2).sum(0)

    def gated_backward(self, grad_TF: Tensor, gate_up: Tensor) -> Tensor:
        as_float(grad_TF, gate_up)
        (height, n), grad = grad_TF.shape, gate_up.new_empty(gate_up.shape)
        rows.gated_backward_kernel[(height,)](whole(grad_TF), whole(gate_up), grad, n, BLOCK=block_of(n), **PLAIN)
        return grad

    def integer_matmul(
        self,
        codes_TK: Tensor,
        row_scales_T: Tensor,
        weight: PackedCodes,
        column_scales_N: Tensor,
        bias_N: Tensor | None,
        residual_TN: Tensor | None,
    ) -> Tensor:
        as_float(row_scales_T, column_scales_N, bias_N, residual_TN)
        (height, k), n = codes_TK.shape, weight.shape[0]
        assert codes_TK.dtype == weight.dtype and weight.shape[1] == k <= LONGEST_SUM
        y = row_scales_T.new_empty(height, n)
        kernel = gemm.int12_matmul_kernel if codes_TK.dtype == torch.int16 else gemm.int8_matmul_kernel
        tile = {"BLOCK_M": gemm.BLOCK_M, "BLOCK_N": gemm.BLOCK_N, "BLOCK_K": gemm.CODES_BLOCK_K}
        inputs = (codes_TK, row_scales_T, weight.packed, column_scales_N, bias_N, residual_TN)
        kernel[tiles(height, n)](*map(whole, inputs), y, height, n, k, **tile, **PLAIN)
        return y

    def matmul(self, x_TK: Tensor, packed: Tensor, n: int, bias_N: Tensor | None, residual_TN: Tensor | None) -> Tensor:
        as_float(x_TK, packed, bias_N, residual_TN)
        height, k = x_TK.shape
        assert packed.shape == (n, k), "packed weight and input disagree"
        y = x_TK.new_empty(height, n)
        tile = {"BLOCK_M": gemm.BLOCK_M, "BLOCK_N": gemm.BLOCK_N, "BLOCK_K": gemm.BLOCK_K}
        inputs = map(whole, (x_TK, packed, bias_N, residual_TN))
        gemm.matmul_kernel[tiles(height, n)](*inputs, y, height, n, k, PRECISION=self.precision, **tile, **PLAIN)
        return y

    def pack_int4(self, codes_NK: Tensor, scales_NG: Tensor) -> PackedInt4:
        """A byte holds a code of the first half of a group, low, and the one at the same place of the second half."""
        as_float(scales_NG)
        n, k = codes_NK.shape
        low, high = (codes_NK + 8).to(torch.uint8).view(n, scales_NG.shape[1], 2, -1).unbind(2)
        return PackedInt4((n, k), scales_NG.contiguous(), (low | high << 4).flatten(1))

    def unpack_int4(self, weight: PackedInt4) -> Tensor:
        bytes_NGE = weight.nibbles.unflatten(1, (weight.scales.shape[1], -1))
        return torch.stack((bytes_NGE & 15, bytes_NGE >> 4), 2).flatten(1).to(torch.int8) - 8

    def matmul_int4(
        self, x_TK: Tensor, weight: PackedInt4, bias_N: Tensor | None, residual_TN: Tensor | None
    ) -> Tensor:
        as_float(x_TK, bias_N, residual_TN)
        (height, k), n = x_TK.shape, weight.shape[0]
        assert weight.shape[1] == k, "packed weight and input disagree on K"
        y = x_TK.new_empty(height, n)
        half = k // weight.scales.shape[1] // 2
        tile = {"BLOCK_M": gemm.BLOCK_M, "BLOCK_N": gemm.BLOCK_N, "BLOCK_K": min(half, gemm.BLOCK_K), "HALF": half}
        inputs = map(whole, (x_TK, weight.nibbles, weight.scales, bias_N, residual_TN))
        gemm.matmul_int4_kernel[tiles(height, n)](*inputs, y, height, n, k, PRECISION=self.precision, **tile, **PLAIN)
        return y

    def fp8_matmul(
        self,
        codes_TK: Tensor,
        row_scales_TG: Tensor,
        weight_NK: Tensor,
        column_scales_NG: Tensor,
        bias_N: Tensor | None,
        residual_TN: Tensor | None,
    ) -> Tensor:
        as_float(row_scales_TG, column_scales_NG, bias_N, residual_TN)
        (height, k), n = codes_TK.shape, len(weight_NK)
        y = row_scales_TG.new_empty(height, n)
        tile = {"BLOCK_M": gemm.BLOCK_M, "BLOCK_N": gemm.BLOCK_N, "BLOCK_K": gemm.CODES_BLOCK_K}
        inputs = (codes_TK, row_scales_TG, weight_NK, column_scales_NG, bias_N, residual_TN)
        sizes = (height, n, k, k // row_scales_TG.shape[1])
        gemm.fp8_matmul_kernel[tiles(height, n)](*map(whole, inputs), y, *sizes, **tile, **PLAIN)
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
        height, (_, kv_heads, dim) = len(qkv_TN), shape_of(keys)
        q = qkv_TN.new_empty(height, heads, dim)
        inputs = (qkv_TN, positions_T, slots_T, cosines_PC, sines_PC, q_gain, k_gain, q)
        attention.split_rotate_kernel[(height, heads + 2 * kv_heads)](
            *map(whole, inputs), *parts_of(keys), *parts_of(values), *store_steps(keys, values), eps,
            heads, kv_heads, dim // 2, HAS_SCALES=isinstance(keys, KVCodes), BLOCK=block_of(dim // 2), **PLAIN,
        )  # fmt: skip
        return q

    def attention(
        self, q_THC: Tensor, keys: KVStore, values: KVStore, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor]:
        as_float(q_THC)
        out, lse = q_THC.new_empty(q_THC.shape), q_THC.new_empty(q_THC.shape[:2])
        kv_heads = shape_of(keys)[1]
        sizes = tile_sizes(q_THC, kv_heads)
        per_tile = queries_per_tile(spans, len(q_THC), sizes)
        attention.attention_kernel[(triton.cdiv(len(q_THC), per_tile), kv_heads)](
            whole(q_THC), *parts_of(keys), *parts_of(values), *layout(spans), out, lse,
            scale, len(q_THC), per_tile, kv_heads, *store_steps(keys, values),
            PRECISION=self.precision, HAS_SCALES=isinstance(keys, KVCodes), **sizes, **PLAIN,
        )  # fmt: skip
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
        (stored_rows, kv_heads, _), count = keys_RGC.shape, len(spans.pointers) - 1
        dq, dk, dv = (x.new_empty(x.shape) for x in (q_THC, keys_RGC, values_RGC))
        delta_TH = (grad_THC * out_THC).sum(-1)
        sizes = tile_sizes(q_THC, kv_heads)
        per_tile = queries_per_tile(spans, len(q_THC), sizes)
        given = tuple(map(whole, (grad_THC, q_THC, keys_RGC, values_RGC, lse_TH, delta_TH)))
        attention.attention_dq_kernel[(triton.cdiv(len(q_THC), per_tile), kv_heads)](
            *given, *layout(spans), dq, scale, len(q_THC), per_tile, kv_heads, kv_heads, 1,
            PRECISION=self.precision, **sizes, **PLAIN,
        )  # fmt: skip
        _, *where = layout(spans)
        attention.attention_dkv_kernel[(triton.cdiv(stored_rows, attention.BLOCK_KEYS), kv_heads)](
            *given, *by_sequence(spans.sequences, count), *where, dk, dv, scale, stored_rows, count, kv_heads,
            PRECISION=self.precision, **sizes, num_warps=attention.WARPS_OF_KEYS, **PLAIN,
        )  # fmt: skip
        return dq, dk, dv

    def token_logprobs(self, logits_TV: Tensor, targets_T: Tensor, inverse_temperature: float) -> Scores:
        as_float(logits_TV)
        as_index(targets_T)
        height, n = logits_TV.shape
        scores = Scores(*(logits_TV.new_empty(height) for _ in range(4)))
        head.token_logprobs_kernel[(height,)](
            whole(logits_TV), whole(targets_T), *scores, inverse_temperature, n, BLOCK=head.BLOCK, **PLAIN
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
        height, n = logits_TV.shape
        given = (logits_TV, targets_T, scores.shifts, scores.sums, scores.entropies, grad_T, grad_entropy_T)
        assert all(tensor is None or tensor.is_contiguous() for tensor in given)
        head.logits_gradient_kernel[(height,)](*given, inverse_temperature, n, BLOCK=head.BLOCK, **PLAIN)
        return logits_TV

    def sample(self, logits_TV: Tensor, uniforms_T: Tensor, inverse_temperature: float) -> tuple[Tensor, Tensor]:
        as_float(logits_TV, uniforms_T)
        height, n = logits_TV.shape
        tokens = logits_TV.new_empty(height, dtype=torch.int64)
        head.sample_kernel[(height,)](
            whole(logits_TV), whole(uniforms_T), tokens, inverse_temperature, n,
            BLOCK=head.BLOCK, PIECE=head.PIECE, **PLAIN,
        )  # fmt: skip
        # By the kernel that the learner scores with: another one's sums may be compiled into another order.
        return tokens, self.token_logprobs(logits_TV, tokens, inverse_temperature).logprobs

    def chunk_sums(self, words_CW: Tensor, multipliers_W: Tensor) -> Tensor:
        """Many chunks at a time: a launch for each would take longer than its sums."""
        parts = [
            torch.stack([(some * multipliers_W).sum(1), ((some >> 32 & 0xFFFFFFFF) * multipliers_W).sum(1)])
            for some in words_CW.split(256)
        ]
        return torch.cat(parts, 1)


def whole(tensor: Tensor | None) -> Tensor | None:
    """What a kernel can read: rows one after another, from a multiple of ALIGNMENT on."""
    if tensor is None:
        return None
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def block_of(n: int) -> int:
    """Numbers of a row of `n` that a program reads at a time."""
    return min(int(triton.next_power_of_2(n)), LONGEST_BLOCK)


def tiles(height: int, n: int) -> tuple[int, int]:
    """Programs of a GEMM with a result [height, n]."""
    return triton.cdiv(height, gemm.BLOCK_M), triton.cdiv(n, gemm.BLOCK_N)


def tile_sizes(q_THC: Tensor, kv_heads: int) -> dict[str, int]:
    """Sizes of attention's tiles, the same for every batch."""
    _, heads, dim = q_THC.shape
    group = int(triton.next_power_of_2(heads // kv_heads))
    return {
        "REPEAT": heads // kv_heads,
        "GROUP": group,
        "DIM": dim,
        "TILE": max(attention.TILE, group),
        "BLOCK_KEYS": attention.BLOCK_KEYS,
        "BLOCK_DIM": max(int(triton.next_power_of_2(dim)), 16),
    }


def queries_per_tile(spans: Spans, queries: int, sizes: dict[str, int]) -> int:
    """One where every query has a sequence of its own, as in a decode step, so that more programs share the work."""
    return 1 if len(spans.pointers) > queries else sizes["TILE"] // sizes["GROUP"]


def by_sequence(sequences_T: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Queries in the order of their sequences, and where those of each of `count` sequences end."""
    ordered, order = sequences_T.sort(stable=True)
    ends = torch.searchsorted(ordered, torch.arange(count, device=ordered.device), right=True)
    return order, ends


def parts_of(store: KVStore) -> tuple[Tensor, Tensor | None]:
    """Values, or codes and their scales."""
    return (store.codes, store.scales) if isinstance(store, KVCodes) else (store, None)
