"""The operations in torch: their definition, and what runs where there is no C compiler.

Shape letters: T rows (tokens), D hidden, K in, N out, F feed-forward, H query heads, G key/value heads,
C head dimension, V vocabulary, R rows of a key/value store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from qarl.quant.formats import INT8, INT16, IntegerFormat
from qarl.quant.qtensor import quantize_rows


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """Which stored rows each query sees.

    Query t belongs to sequence `sequences[t]` and sees its first `visible[t]` keys. Sequence s owns the spans
    `pointers[s]:pointers[s+1]`; span i is rows `starts[i] : starts[i] + lengths[i]` of the store. `families`
    cuts the queries into runs whose keys are shared with no other run (the backward pass runs them in
    parallel). `longest` is the largest `visible`. All int64.
    """

    sequences: Tensor
    visible: Tensor
    pointers: Tensor
    starts: Tensor
    lengths: Tensor
    families: Tensor
    longest: int


@dataclass(frozen=True, slots=True, eq=False)
class PackedCodes:
    """Integer weight codes of `shape` (N, K) and `dtype`, in the layout of the kernels that packed them.

    `packed` has rows of the codes, or blocks of such rows, along its first axis. `corrections`, as many for every
    (padded) row, belong to some layouts of 8-bit codes (see `csrc/gemm_integer.c`).
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    packed: Tensor
    corrections: Tensor | None = None

    def outputs(self, some: range, block: int) -> PackedCodes:
        """These rows of the codes, `some` starting at a multiple of `block` rows, without a copy."""
        at = blocks(some, block)
        corrections = None if self.corrections is None else self.corrections[at]
        return PackedCodes((len(some), self.shape[1]), self.dtype, self.packed[at], corrections)


@dataclass(frozen=True, slots=True, eq=False)
class PackedInt4:
    """4-bit weight codes of `shape` (N, K) with scales [N, G] for groups along K, in the kernels' layout.

    `nibbles` has rows of the codes, or panels of such rows, along its first axis; kernels have scales in panels too.
    """

    shape: tuple[int, int]
    scales: Tensor
    nibbles: Tensor
    panel_scales: Tensor | None = None

    def outputs(self, some: range, panel: int) -> PackedInt4:
        """These rows of the codes, `some` starting at a multiple of `panel` rows, without a copy."""
        at = blocks(some, panel)
        panel_scales = None if self.panel_scales is None else self.panel_scales[at]
        scales = self.scales[some.start : some.stop]
        return PackedInt4((len(some), self.shape[1]), scales, self.nibbles[at], panel_scales)


@dataclass(frozen=True, slots=True)
class Rounding:
    """What kernels may round the output's gradient to, a scale a row or a column, on its way to an integer product.

    To nearest on INT16. On INT8 by dither, up with the probability of the fraction, so that the mean is the gradient
    itself: a function of `seed` (64 bits) and the place in the matrix.
    """

    grid: IntegerFormat = INT16
    seed: int = 0


class Scores(NamedTuple):
    """Of each row of logits: the target's log-probability, the entropy, and the maximum and sum that made them."""

    logprobs: Tensor
    shifts: Tensor
    sums: Tensor
    entropies: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KVCodes:
    """A store of keys or values on the int8 grid: `codes` [R, G, C] and one scale a row and head, `scales` [R, G]."""

    codes: Tensor
    scales: Tensor

    def as_float(self) -> Tensor:
        return self.codes.float() * self.scales[..., None]


KVStore = Tensor | KVCodes
"""Keys or values of all tokens [R, G, C]: fp32, or int8 codes."""


def shape_of(store: KVStore) -> tuple[int, int, int]:
    """(R, G, C)"""
    rows, heads, dim = (store.codes if isinstance(store, KVCodes) else store).shape
    return rows, heads, dim


class ReferenceKernels:
    """Every operation as plain torch. Floating-point GEMMs here may depend on the batch; see `exact_matmul`.

    `multiplies_fp8`: whether `fp8_matmul` is faster than a product of what the codes stand for.
    `device` is where tensors that are made for an operation must be; those given say where it computes.
    `panel`: output columns that a packed fp32 or 4-bit weight holds together; `block`: those of packed integer codes.
    """

    name = "reference"
    device = torch.device("cpu")
    exact_matmul = False
    multiplies_fp8 = False
    panel = 1
    block = 1

    def rms_norm(self, x_TD: Tensor, gain_D: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * gain, row by row."""
        return x_TD * torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps) * gain_D

    def rms_norm_quantize(self, x_TD: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`rms_norm`, then `quantize_rows`."""
        return self.quantize_rows(self.rms_norm(x_TD, gain_D, eps))

    def quantize_rows(self, x_TK: Tensor, grid: IntegerFormat = INT8) -> tuple[Tensor, Tensor]:
        """Codes int8 [T, K] and one fp32 scale a row [T]: `quant.qtensor.quantize_rows`, the definition."""
        return quantize_rows(x_TK, grid)

    def gated(self, gate_up_TF: Tensor) -> Tensor:
        """silu(gate) * up; gate and up are the halves of the last axis."""
        gate, up = gate_up_TF.chunk(2, -1)
        return F.silu(gate) * up

    def gated_quantize(self, gate_up_TF: Tensor) -> tuple[Tensor, Tensor]:
        return self.quantize_rows(self.gated(gate_up_TF))

    def rms_norm_backward(self, grad_TD: Tensor, x_TD: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Gradients of RMSNorm with respect to x (shape of x) and gain [D]; leading axes of x are rows."""
        inverse = torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps)
        unit = x_TD * inverse
        grad_gain = (grad_TD * unit).flatten(0, -2).sum(0)
        grad_unit = grad_TD * gain_D
        grad_x = (grad_unit - unit * (grad_unit * unit).mean(-1, keepdim=True)) * inverse
        return grad_x, grad_gain

    def gated_backward(self, grad_TF: Tensor, gate_up: Tensor) -> Tensor:
        """Gradient of silu(gate) * up with respect to gate_up [T, 2F], gate first."""
        gate, up = gate_up.chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad_gate = grad_TF * up * (sigmoid + silu * (1 - sigmoid))
        return torch.cat([grad_gate, grad_TF * silu], -1)

    def pack_codes(self, codes_NK: Tensor, grid: IntegerFormat = INT8) -> PackedCodes:
        """Weight codes of a grid (int8, or int16 in [-2047, 2047]) in the layout that `integer_matmul` wants."""
        return PackedCodes((codes_NK.shape[0], codes_NK.shape[1]), codes_NK.dtype, codes_NK)

    def unpack_codes(self, weight: PackedCodes) -> Tensor:
        """The codes [N, K] that `pack_codes` packed."""
        return weight.packed

    def changed_codes(self, before: PackedCodes, after: PackedCodes) -> int:
        """How many codes differ."""
        return int(torch.count_nonzero(self.unpack_codes(before) != self.unpack_codes(after)))

    def integer_matmul(
        self,
        codes_TK: Tensor,
        row_scales_T: Tensor,
        weight: PackedCodes,
        column_scales_N: Tensor,
        bias_N: Tensor | None,
        residual_TN: Tensor | None,
    ) -> Tensor:
        """codes @ weight^T as exact integers, times both scales, plus bias, plus residual.

        Both sides are int8, or both 12-bit codes in int16. Sums are rounded to fp32 once, where they pass 2^24.
        """
        if codes_TK.dtype == torch.int16:
            # Sums of up to 2^53 / 2^22 products are exact in float64.
            accumulator_TN = codes_TK.double() @ self.unpack_codes(weight).double().t()
        else:
            accumulator_TN = torch._int_mm(codes_TK, self.unpack_codes(weight).t())
        return self.dequantize(accumulator_TN, row_scales_T, column_scales_N, bias_N, residual_TN)

    def grad_rows(self, grad_TN: Tensor, weight: PackedCodes, scales_N: Tensor, rounding: Rounding) -> Tensor:
        """grad @ dequantized weight, [T, K]: the gradient of an integer product with respect to its rows."""
        return (grad_TN * scales_N) @ self.unpack_codes(weight).float()

    def add_grad_weight(
        self,
        grad_TN: Tensor,
        codes_TK: Tensor,
        row_scales_T: Tensor,
        weights: Sequence[Tensor],
        rounding: Rounding,
    ) -> None:
        """Add grad^T @ dequantized rows, [N, K], to `weights`, its parts [n, K] that follow one another along N.

        The gradient of an integer product with respect to its weight.
        """
        scaled_TN, rows_TK = grad_TN * row_scales_T[:, None], codes_TK.float()
        for weight, part in zip(weights, scaled_TN.split([len(weight) for weight in weights], 1), strict=True):
            weight.addmm_(part.t(), rows_TK)

    def dequantize(
        self,
        accumulator_TN: Tensor,
        row_scales_T: Tensor,
        column_scales_N: Tensor,
        bias_N: Tensor | None,
        residual_TN: Tensor | None,
    ) -> Tensor:
        y_TN = accumulator_TN.float() * (row_scales_T[:, None] * column_scales_N)
        y_TN = y_TN if bias_N is None else y_TN + bias_N
        return y_TN if residual_TN is None else y_TN + residual_TN

    def pack(self, weight_NK: Tensor) -> Tensor:
        """A float weight in the layout that `matmul` wants."""
        return weight_NK.clone()

    def unpack(self, packed: Tensor, n: int) -> Tensor:
        """The [N, K] weight that `pack` packed."""
        return packed

    def matmul(self, x_TK: Tensor, packed: Tensor, n: int, bias_N: Tensor | None, residual_TN: Tensor | None) -> Tensor:
        """x @ weight^T in fp32, plus bias, plus residual; `n` output columns."""
        y_TN = x_TK @ packed.t()
        y_TN = y_TN if bias_N is None else y_TN + bias_N
        return y_TN if residual_TN is None else y_TN + residual_TN

    def add_low_rank_(self, y_TN: Tensor, x_TK: Tensor, a: Tensor, b: Tensor, siblings_S3: Tensor) -> Tensor:
        """y += (x A^T) B^T in fp32, for each of S siblings in its own columns; `y_TN` is overwritten and returned.

        `a` is `pack` of their A [r, K] stacked, `b` are those of their B [n, r] one after another. `siblings_S3` says
        of each its first column of y, how many it has, and the first of its r columns of x A^T.
        """
        inner_TR, rank, first = x_TK @ a.t(), b.shape[1], 0
        for column, height, inner in siblings_S3.tolist():
            added_TN = inner_TR[:, inner : inner + rank] @ b[first : first + height].t()
            y_TN[:, column : column + height] += added_TN
            first += height
        return y_TN

    def pack_int4(self, codes_NK: Tensor, scales_NG: Tensor) -> PackedInt4:
        """4-bit codes (held in int8) with one scale a group along K, in the layout that `matmul_int4` wants."""
        return PackedInt4((codes_NK.shape[0], codes_NK.shape[1]), scales_NG, codes_NK)

    def unpack_int4(self, weight: PackedInt4) -> Tensor:
        """The codes int8 [N, K] that `pack_int4` packed."""
        return weight.nibbles

    def changed_int4(self, before: PackedInt4, after: PackedInt4) -> int:
        """How many codes differ."""
        return int(torch.count_nonzero(self.unpack_int4(before) != self.unpack_int4(after)))

    def dense_int4(self, weight: PackedInt4) -> Tensor:
        """code * scale, fp32 [N, K]."""
        groups_NGE = self.unpack_int4(weight).float().unflatten(1, (weight.scales.shape[1], -1))
        dense: Tensor = (groups_NGE * weight.scales[..., None]).flatten(1)
        return dense

    def matmul_int4(
        self, x_TK: Tensor, weight: PackedInt4, bias_N: Tensor | None, residual_TN: Tensor | None
    ) -> Tensor:
        """x @ (code * scale)^T in fp32, plus bias, plus residual: `matmul` of the expanded weight."""
        return self.matmul(x_TK, self.dense_int4(weight), weight.shape[0], bias_N, residual_TN)

    def fp8_matmul(
        self,
        codes_TK: Tensor,
        row_scales_TG: Tensor,
        weight_NK: Tensor,
        column_scales_NG: Tensor,
        bias_N: Tensor | None,
        residual_TN: Tensor | None,
    ) -> Tensor:
        """codes @ weight^T of E4M3 codes times both scales, group by group along K, plus bias, plus residual."""
        groups = row_scales_TG.shape[1]
        x_TGE, weight_NGE = (codes.float().unflatten(1, (groups, -1)) for codes in (codes_TK, weight_NK))
        x_TK, dense_NK = (x_TGE * row_scales_TG[..., None]).flatten(1), (weight_NGE * column_scales_NG[..., None])
        return self.matmul(x_TK, self.pack(dense_NK.flatten(1)), len(weight_NK), bias_N, residual_TN)

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
        """Split a fused projection, normalize heads (`gains`: Qwen3), rotate; returns queries [T, H, C].

        Keys and values are written to rows `slots_T` of their stores. Rotation pairs element i with
        i + C/2 (Hugging Face layout); `cosines_PC` and `sines_PC` are [positions, C/2].
        """
        _, kv_heads, dim = shape_of(keys)
        q, k, v = qkv_TN.view(len(qkv_TN), -1, dim).split([heads, kv_heads, kv_heads], 1)
        if gains is not None:
            q, k = self.rms_norm(q, gains[0], eps), self.rms_norm(k, gains[1], eps)
        cosine, sine = cosines_PC[positions_T][:, None], sines_PC[positions_T][:, None]
        self._put(keys, slots_T, rotate(k, cosine, sine))
        self._put(values, slots_T, v)
        return rotate(q, cosine, sine)

    def split_rotate_backward(
        self,
        dq_THC: Tensor,
        dk_TGC: Tensor,
        dv_TGC: Tensor,
        positions_T: Tensor,
        cosines_PC: Tensor,
        sines_PC: Tensor,
    ) -> Tensor:
        """Gradient of the fused projection [T, (H + 2G) * C] from those of `split_rotate`'s results, without norms.

        The inverse of a rotation is the rotation by the opposite angle.
        """
        cosine, sine = cosines_PC[positions_T][:, None], sines_PC[positions_T][:, None]
        return torch.cat([rotate(dq_THC, cosine, -sine), rotate(dk_TGC, cosine, -sine), dv_TGC], 1).flatten(1)

    def _put(self, store: KVStore, slots_T: Tensor, x_TGC: Tensor) -> None:
        if isinstance(store, KVCodes):
            codes, scales = self.quantize_rows(x_TGC.flatten(0, 1))
            store.codes[slots_T], store.scales[slots_T] = codes.view_as(x_TGC), scales.view(x_TGC.shape[:2])
        else:
            store[slots_T] = x_TGC

    def attention(
        self, q_THC: Tensor, keys: KVStore, values: KVStore, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Softmax attention over each query's visible keys; returns [T, H, C] and the log-sum-exp [T, H]."""
        repeat = q_THC.shape[1] // shape_of(keys)[1]
        keys_RGC, values_RGC = (store.as_float() if isinstance(store, KVCodes) else store for store in (keys, values))
        out, lse = torch.empty_like(q_THC), q_THC.new_empty(q_THC.shape[:2])
        for t in range(len(q_THC)):
            rows = visible_rows(spans, t)
            k, v = (store[rows].repeat_interleave(repeat, 1) for store in (keys_RGC, values_RGC))
            scores = torch.einsum("hc,jhc->hj", q_THC[t], k) * scale
            lse[t] = scores.logsumexp(-1)
            out[t] = torch.einsum("hj,jhc->hc", (scores - lse[t][:, None]).exp(), v)
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
        """Gradients of queries, keys and values, shaped like them."""
        kv_heads = keys_RGC.shape[1]
        repeat = q_THC.shape[1] // kv_heads
        dq, dk, dv = torch.zeros_like(q_THC), torch.zeros_like(keys_RGC), torch.zeros_like(values_RGC)
        for t in range(len(q_THC)):
            rows = visible_rows(spans, t)
            k, v = (store[rows].repeat_interleave(repeat, 1) for store in (keys_RGC, values_RGC))
            p = (torch.einsum("hc,jhc->hj", q_THC[t], k) * scale - lse_TH[t][:, None]).exp()
            delta = (grad_THC[t] * out_THC[t]).sum(-1, keepdim=True)
            ds = p * (torch.einsum("hc,jhc->hj", grad_THC[t], v) - delta) * scale
            dq[t] = torch.einsum("hj,jhc->hc", ds, k)
            dk[rows] += torch.einsum("hj,hc->jhc", ds, q_THC[t]).unflatten(1, (kv_heads, repeat)).sum(2)
            dv[rows] += torch.einsum("hj,hc->jhc", p, grad_THC[t]).unflatten(1, (kv_heads, repeat)).sum(2)
        return dq, dk, dv

    def token_logprobs(self, logits_TV: Tensor, targets_T: Tensor, inverse_temperature: float) -> Scores:
        """Log-probabilities of `targets_T` and entropies under softmax(logits / temperature)."""
        shifts = logits_TV.max(-1).values
        scaled = (logits_TV - shifts[:, None]) * inverse_temperature
        sums = scaled.exp().sum(-1)
        logprobs = scaled.gather(-1, targets_T[:, None])[:, 0] - sums.log()
        return Scores(logprobs, shifts, sums, sums.log() - (scaled.exp() * scaled).sum(-1) / sums)

    def logits_gradient_(
        self,
        logits_TV: Tensor,
        targets_T: Tensor,
        scores: Scores,
        grad_T: Tensor,
        grad_entropy_T: Tensor | None,
        inverse_temperature: float,
    ) -> Tensor:
        """Overwrite a block of logits with d(loss) / d(logits), given the gradients of `token_logprobs`' results.

        d logprob / d logit = (onehot - p) / temperature; d entropy / d logit = -p (log p + entropy) / temperature.
        `targets_T` count from the block's first column and may lie outside of it.
        """
        log_p = (logits_TV - scores.shifts[:, None]) * inverse_temperature - scores.sums.log()[:, None]
        grads = log_p.exp() * -grad_T[:, None]
        if grad_entropy_T is not None:
            grads -= log_p.exp() * (log_p + scores.entropies[:, None]) * grad_entropy_T[:, None]
        (here,) = ((targets_T >= 0) & (targets_T < logits_TV.shape[1])).nonzero(as_tuple=True)
        grads[here, targets_T[here]] += grad_T[here]
        return logits_TV.copy_(grads.mul_(inverse_temperature))

    def sample(self, logits_TV: Tensor, uniforms_T: Tensor, inverse_temperature: float) -> tuple[Tensor, Tensor]:
        """One token a row, by inverting the cumulative distribution at `uniforms_T` in [0, 1), and its log-prob."""
        weights = ((logits_TV - logits_TV.max(-1, keepdim=True).values) * inverse_temperature).exp().double()
        cumulative = weights.cumsum(-1)
        threshold = uniforms_T.double()[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
        last_possible = weights.shape[1] - 1 - (weights.flip(-1) > 0).int().argmax(-1)
        tokens = torch.minimum(tokens, last_possible)
        return tokens, self.token_logprobs(logits_TV, tokens, inverse_temperature).logprobs

    def chunk_sums(self, words_CW: Tensor, multipliers_W: Tensor) -> Tensor:
        """Of each chunk of 64-bit words the sums, modulo 2^64, of word * multiplier and of its upper half * multiplier.

        int64 in and out, [2, C].
        """
        sums = words_CW.new_empty(2, len(words_CW))
        for chunk, words in enumerate(words_CW):  # one by one: the products take as much memory as their words
            sums[0, chunk] = (words * multipliers_W).sum()
            sums[1, chunk] = ((words >> 32 & 0xFFFFFFFF) * multipliers_W).sum()
        return sums


def blocks(some: range, size: int) -> slice:
    """Which blocks of `size` hold these rows; the first row is a block's first."""
    assert some.start % size == 0
    return slice(some.start // size, -(-some.stop // size))


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout: (a, b) -> (a cos - b sin, b cos + a sin)."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


def visible_rows(spans: Spans, t: int) -> Tensor:
    """Store rows that query t sees, in position order."""
    s = int(spans.sequences[t])
    runs = [
        torch.arange(int(spans.starts[i]), int(spans.starts[i] + spans.lengths[i]), device=spans.starts.device)
        for i in range(int(spans.pointers[s]), int(spans.pointers[s + 1]))
    ]
    return torch.cat(runs)[: int(spans.visible[t])]
