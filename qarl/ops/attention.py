"""Rotary split and span attention with their gradients.

Shape letters: T tokens, H query heads, G key/value heads, C head dimension, R rows of a store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qarl.ops.kernels import kernels
from qarl.ops.reference import KVCodes, KVStore, Spans


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """How a fused projection becomes queries, keys and values: head counts and rotary tables [positions, C/2].

    With `rounds_kv`, keys and values are rounded as an int8 store would, straight-through in the gradient.
    """

    heads: int
    kv_heads: int
    dim: int
    eps: float
    cosines: Tensor
    sines: Tensor
    rounds_kv: bool = False


def split_rotate(
    qkv: Tensor, positions_T: Tensor, rotation: Rotation, gains: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Fused projection [T, (H + 2G) * C] to rotated queries [T, H, C], rotated keys and values [T, G, C]."""
    q_gain, k_gain = gains if gains is not None else (None, None)
    return _SplitRotate.apply(qkv, positions_T, rotation, q_gain, k_gain)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, eq=False)
class Store:
    """One layer's keys and values [R, G, C] in an engine, and the rows `slots_T` that a forward's tokens fill."""

    keys: KVStore
    values: KVStore
    slots_T: Tensor


def split_rotate_into(
    store: Store, qkv: Tensor, positions_T: Tensor, rotation: Rotation, gains: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, KVStore, KVStore]:
    """As `split_rotate`, without gradient, into a store; returns the queries and the whole store."""
    tables = (rotation.cosines, rotation.sines)
    q = kernels().split_rotate(
        qkv, positions_T, store.slots_T, *tables, gains, rotation.eps, rotation.heads, store.keys, store.values
    )
    return q, store.keys, store.values


def attention(q_THC: Tensor, keys: KVStore, values: KVStore, spans: Spans) -> Tensor:
    """Causal attention of every query over its visible stored rows, scaled by C^-1/2; [T, H, C].

    Differentiable where keys and values are fp32.
    """
    scale = q_THC.shape[-1] ** -0.5
    if not torch.is_grad_enabled():
        return kernels().attention(q_THC, keys, values, spans, scale)[0]
    return _Attention.apply(q_THC, keys, values, spans, scale)  # type: ignore[no-any-return]


def rounded(x_TGC: Tensor) -> Tensor:
    """What an int8 store gives back for these keys or values: one scale a token and head."""
    codes, scales = kernels().quantize_rows(x_TGC.flatten(0, 1))
    return KVCodes(codes.view_as(x_TGC), scales.view(x_TGC.shape[:2])).as_float()


class _SplitRotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, positions: Tensor, rotation: Rotation, q_gain: Tensor | None, k_gain: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys = qkv.new_empty(len(qkv), rotation.kv_heads, rotation.dim)
        values = torch.empty_like(keys)
        gains = (q_gain, k_gain) if q_gain is not None and k_gain is not None else None
        tables = (rotation.cosines, rotation.sines)
        slots = torch.arange(len(qkv), device=qkv.device)
        q = kernels().split_rotate(qkv, positions, slots, *tables, gains, rotation.eps, rotation.heads, keys, values)
        if rotation.rounds_kv:
            keys, values = rounded(keys), rounded(values)
        ctx.rotation = rotation
        ctx.save_for_backward(positions, q_gain, k_gain, qkv if gains is not None else None)
        return q, keys, values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        rotation: Rotation = ctx.rotation
        positions, q_gain, k_gain, qkv = ctx.saved_tensors
        grads = (dq.contiguous(), dk.contiguous(), dv.contiguous())
        grad = kernels().split_rotate_backward(*grads, positions, rotation.cosines, rotation.sines)
        if qkv is None:
            return grad, None, None, None, None
        counts = [rotation.heads, rotation.kv_heads, rotation.kv_heads]
        (dq, dk, _), (q, k, _) = (fused.view(len(qkv), -1, rotation.dim).split(counts, 1) for fused in (grad, qkv))
        dq, dq_gain = kernels().rms_norm_backward(dq, q, q_gain, rotation.eps)
        dk, dk_gain = kernels().rms_norm_backward(dk, k, k_gain, rotation.eps)
        return torch.cat([dq, dk, dv], 1).flatten(1), None, None, dq_gain, dk_gain


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, keys: Tensor, values: Tensor, spans: Spans, scale: float) -> Tensor:
        out, lse = kernels().attention(q, keys, values, spans, scale)
        ctx.spans, ctx.scale = spans, scale
        ctx.save_for_backward(q, keys, values, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, out, lse = ctx.saved_tensors
        backward = kernels().attention_backward
        dq, dk, dv = backward(grad.contiguous(), q, keys, values, out, lse, ctx.spans, ctx.scale)
        return dq, dk, dv, None, None
