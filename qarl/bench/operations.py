"""What work costs, counted: operations of GEMMs, and bytes that a kernel call reads and writes.

Operations are counted as in the field: a multiply-add is two. Bytes are counted once for every tensor read and every
tensor written, whatever caches do: a weight as N x K numbers of its format with its scales (the padding of packed
layouts is left out), and of a key/value store and of rotary tables only the rows that the call touches.
Shape letters: T rows, K in, N out, R rows of a store, G key/value heads, C head dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qarl.models.config import ModelConfig
from qarl.ops.reference import KVCodes, KVStore, PackedCodes, PackedInt4, shape_of

LAYER_GEMMS = ("qkv", "output", "gate_up", "down")
"""In the order of `Layer.projections`."""


def gemm_shapes(config: ModelConfig, vocab_size: int) -> list[tuple[str, int, int]]:
    """(name, N, K) of the GEMMs of one layer and of the head."""
    hidden, dim = config.hidden_size, config.head_dim
    return [
        ("qkv", (config.num_heads + 2 * config.num_kv_heads) * dim, hidden),
        ("output", hidden, config.num_heads * dim),
        ("gate_up", 2 * config.intermediate_size, hidden),
        ("down", hidden, config.intermediate_size),
        ("head", vocab_size, hidden),
    ]


def gemm_operations(config: ModelConfig, vocab_size: int) -> tuple[int, int]:
    """Operations in GEMMs per token: of all layers, and of the head."""
    *layer, (_, head_n, head_k) = gemm_shapes(config, vocab_size)
    return 2 * config.num_layers * sum(n * k for _, n, k in layer), 2 * head_n * head_k


def update_operations(
    config: ModelConfig, vocab_size: int, packed_tokens: int, trained_tokens: int, recomputed: bool
) -> int:
    """Operations in the GEMMs of one update, with N weights in the layers and H in the head.

    Layers, for every packed token: 2N forward, 4N backward (2N for the gradient of the input, 2N for the weight's) and,
    where activations are `recomputed`, all but the last product of a layer again. Head, for every trained token: 2H
    forward, 2H to compute the logits again, 4H backward.
    """
    body, head = gemm_operations(config, vocab_size)
    *_, (_, down_n, down_k), _ = gemm_shapes(config, vocab_size)
    again = body - 2 * config.num_layers * down_n * down_k if recomputed else 0
    return packed_tokens * (body * 3 + again) + trained_tokens * head * 4


def touched_bytes(method: str, given: Mapping[str, Any], result: Any) -> int:
    """Bytes read and written by one call of a method of `ReferenceKernels` with these arguments and this result."""
    if method == "split_rotate":
        rows, table = len(given["qkv_TN"]), given["cosines_PC"]
        per_row = store_row_bytes(given["keys"]) + store_row_bytes(given["values"]) + 2 * size_bytes(table[0])
        read = [given[name] for name in ("qkv_TN", "positions_T", "slots_T", "gains")]
        return rows * per_row + sum(map(size_bytes, read)) + size_bytes(result)
    if method == "attention":
        visible = int(given["spans"].visible.sum())
        per_row = store_row_bytes(given["keys"]) + store_row_bytes(given["values"])
        return visible * per_row + size_bytes(given["q_THC"]) + size_bytes(result)
    if method == "matmul":
        weight_bytes: int = 4 * given["n"] * given["x_TK"].shape[1]  # without the padding of `packed`
        read = [given[name] for name in ("x_TK", "bias_N", "residual_TN")]
        return weight_bytes + sum(map(size_bytes, read)) + size_bytes(result)
    return sum(map(size_bytes, given.values())) + size_bytes(result)


def size_bytes(value: object) -> int:
    """Bytes of a tensor, a weight, or a tuple of them; 0 of what is none."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, tuple):
        return sum(map(size_bytes, value))
    if isinstance(value, PackedCodes):
        codes = value.shape[0] * value.shape[1]  # without the padding of `packed`
        return codes // 2 if value.packed.dtype == torch.uint8 else codes * value.dtype.itemsize
    if isinstance(value, PackedInt4):
        return value.shape[0] * value.shape[1] // 2 + value.scales.nbytes
    return 0


def store_row_bytes(store: KVStore) -> int:
    """Bytes of one token's keys, or values, in a store: G x C numbers, and for codes a scale a head."""
    _, heads, dim = shape_of(store)
    return heads * (dim + 4) if isinstance(store, KVCodes) else heads * 4 * dim
