"""The only rounding in the house: weights, activations and cached keys and values all pass through here.

The arithmetic, which every kernel repeats bit for bit. For the elements x that share a scale, with L the
format's largest value (127, 7 or 448), all operations in fp32, each correctly rounded, none fused:

    1. amax  = max |x|                     exact; NaN or infinity is an error
    2. if amax < 2^-100: scale = 1, all codes 0, done
    3. scale = amax / L                    a division, never a product with 1/L
    4. factor = L / amax                   a division, never 1 / scale
    5. code  = round_half_even(x * factor) to the format's grid (clamped to [-L, L])

and back, code * scale, one fp32 product. In C: `_mm512_cvtps_epi32(_mm512_mul_ps(x, factor))` under the default
rounding mode; in Triton: `div_rn` for the divisions. Codes are those of vLLM's dynamic per-token INT8 kernels.

Idempotent: quantizing the dequantized values gives the same codes and the same scales. The codes because
code * scale * factor is within 2^-21 of the code, relatively; the scale because L is one less than a power of
two (448 = 7 * 64), for which no quotient amax / L has a significand that L * scale would round away from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.errors import RunError
from qarl.quant.formats import NumberFormat
from qarl.quant.scales import scale_and_inverse
from qarl.quant.scheme import Quantizer, Scheme


@dataclass(frozen=True, slots=True, eq=False)
class QTensor:
    """A quantized matrix: `codes` [N, K] (int8, 4-bit codes too, or float8_e4m3fn) and fp32 `scale`.

    `scale` is [N, 1] per row, [N, K / size] per group, [ceil(N / rows), K / columns] per block.
    """

    codes: Tensor
    scale: Tensor
    scheme: Scheme


def quantize(weight_NK: Tensor, scheme: Scheme, name: str) -> QTensor:
    """Round a weight to its scheme's grid; the codes and scales are what learner and engine multiply with.

    `weight_NK` is the master weight, never a copy rounded to another dtype first. `name` is used in errors:
    ConfigurationError if K does not fill whole groups, RunError if a value is not finite.
    """
    assert scheme.weight is not None, f"{name}: scheme '{scheme.name}' does not quantize"
    scheme.check_shape(name, (weight_NK.shape[0], weight_NK.shape[1]))
    codes, scale = _quantize_matrix(weight_NK, scheme.weight, name)
    return QTensor(codes, scale, scheme)


def dequantize(q: QTensor) -> Tensor:
    """The matrix that the codes stand for, fp32 [N, K]."""
    assert q.scheme.weight is not None, f"scheme '{q.scheme.name}' does not quantize"
    return _dequantize_matrix(q.codes, q.scale, q.scheme.weight)


def quantize_rows(
    x: Tensor, number_format: NumberFormat, name: str = "activations", scale_dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Quantize every row along the last dimension from itself alone: codes [..., K], fp32 scale [...].

    The definition of dynamic per-token activation quantization ([T, K]) and of a quantized KV cache
    ([T, heads, head size]: per token and head). RunError naming `name` if a value is not finite.
    """
    x = x.detach().to(torch.float32)
    amax = x.abs().amax(dim=-1)
    if not bool(amax.isfinite().all()):
        raise RunError(f"{name}: non-finite values in {_first_bad_row(amax)}; they cannot be quantized")
    scale, factor = scale_and_inverse(amax, number_format.largest, scale_dtype)
    if scale_dtype == torch.float16 and not bool(scale.isfinite().all()):
        raise RunError(f"{name}: values too large for scales in float16 in {_first_bad_row(scale)}")
    return number_format.round_to_grid(x * factor.unsqueeze(-1)), scale


def dequantize_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """Values fp32 [..., K] of `quantize_rows`'s codes [..., K] and scale [...]."""
    return codes.to(torch.float32) * scale.unsqueeze(-1)


def quantize_activations(x_TK: Tensor, quantizer: Quantizer, name: str = "activations") -> tuple[Tensor, Tensor]:
    """Quantize a scheme's activations: codes [T, K], fp32 scale [T, G]; G is 1 for one scale a token."""
    return _quantize_matrix(x_TK, quantizer, name)


def dequantize_activations(codes_TK: Tensor, scale_TG: Tensor, quantizer: Quantizer) -> Tensor:
    """Values fp32 [T, K] of `quantize_activations`'s codes and scale."""
    return _dequantize_matrix(codes_TK, scale_TG, quantizer)


def _quantize_matrix(x_NK: Tensor, quantizer: Quantizer, name: str) -> tuple[Tensor, Tensor]:
    split = quantizer.granularity.split(x_NK)
    codes_HGE, scale_HG = quantize_rows(split, quantizer.format, name, quantizer.scale_dtype)
    return quantizer.granularity.join(codes_HGE, x_NK.shape[0]).contiguous(), scale_HG


def _dequantize_matrix(codes_NK: Tensor, scale_HG: Tensor, quantizer: Quantizer) -> Tensor:
    # Widened first: not every tensor operation knows 8-bit floating point.
    codes_HGE = quantizer.granularity.split(codes_NK.to(torch.float32))
    return quantizer.granularity.join(dequantize_rows(codes_HGE, scale_HG), codes_NK.shape[0]).contiguous()


def _first_bad_row(amax: Tensor) -> str:
    bad = (~amax.isfinite()).nonzero()
    return f"{len(bad)} of {amax.numel()} rows, groups or blocks, the first at index {tuple(bad[0].tolist())}"
