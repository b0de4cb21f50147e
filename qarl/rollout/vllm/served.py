"""What a vLLM worker really serves, read back under Hugging Face names.

Kernels keep weights in layouts of their own (Marlin, cutlass, oneDNN), some behind a handle. So a layer is asked what
it multiplies with: its product with the identity is its weight, codes times scales, whatever the layout. From that the
codes are exact: an output of bfloat16 is off by less than 2^-8, and of the largest codes 127 that is less than a half.
Scales are compared within the outputs' precision. Shape letters: N output channels, K input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers.linear import LinearBase, QKVParallelLinear, RowParallelLinear

from qarl.models.lora import PREFIX, A, B
from qarl.quant import Scheme, scheme_named

ROWS_AT_A_TIME = 512
"""Of the identity: bounds the memory of a reading."""


Layer = TypeVar("Layer", LinearBase, BaseLinearLayerWithLoRA)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One Hugging Face matrix inside a worker's layer: rows of the layer's weight, and of the whole matrix."""

    module: str
    of_layer: slice
    rows: slice
    columns: slice


@torch.no_grad()
def served(model: Any, received: Mapping[str, Tensor], schemes: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors of `received` as this worker has them; what other workers hold is left as it was received.

    `received` holds codes as `<module>.weight`, scales, and floats in the type they are served in. A scale that the
    products do not agree with is NaN. KeyError for a tensor that the model has no place for.
    """
    found = {name: tensor.clone() for name, tensor in received.items()}
    seen = set()
    for layer, parts in _layers(model, LinearBase):
        dense = _dense(layer).cpu()
        for part in parts:
            name = f"{part.module}.weight"
            if part.module in schemes:
                _take_codes(found, part, dense[part.of_layer], scheme_named(schemes[part.module]))
            else:
                found[name][part.rows, part.columns] = dense[part.of_layer]
            if (bias := f"{part.module}.bias") in received:
                found[bias][part.rows] = layer.bias[part.of_layer].cpu()
            seen |= {name, f"{name}_scale", bias}
    parameters = dict(model.named_parameters())
    for name in received.keys() - seen:
        rows = found[name][_vocabulary_rows(model, name)]
        rows.copy_(parameters[name][: len(rows)])
    _check_head(model, found, received)
    return found


@torch.no_grad()
def served_adapters(model: Any, received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters of `received`, by PEFT's names, as this worker multiplies with them; and others that it has.

    What other workers hold is left as it was received. A is what vLLM keeps, which has room for more ranks, where there
    is anything in that room.
    """
    found = {name: tensor.clone() for name, tensor in received.items()}
    for layer, parts in _layers(model, BaseLinearLayerWithLoRA):
        for part, stacked_a, stacked_b in zip(parts, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
            a, b = stacked_a[0, 0].cpu(), stacked_b[0, 0].cpu()
            name_a, name_b = f"{PREFIX}{part.module}{A}", f"{PREFIX}{part.module}{B}"
            rank = len(received[name_a]) if name_a in received else 0
            if bool(a[rank:].any()) or bool(b[:, rank:].any()):
                found[name_a] = a
            elif rank > 0:
                found[name_a][:, part.columns] = a[:rank]
                found[name_b][part.rows] = b[:, :rank]
    return found


def _check_head(model: Any, found: dict[str, Tensor], received: Mapping[str, Tensor]) -> None:
    """What logits are made with, where that is not what was sent: it may be a copy of the embeddings."""
    name = "lm_head.weight" if "lm_head.weight" in received else "model.embed_tokens.weight"
    sent = received[name]
    device = _device(model)
    pieces = [model.compute_logits(rows) for rows in _identity(sent.shape[1], sent.dtype, device)]
    product = torch.cat(pieces).t().to(sent.dtype).cpu()
    if not torch.equal(product, sent):
        found[name].copy_(product)


def _take_codes(found: dict[str, Tensor], part: Part, dense_NK: Tensor, scheme: Scheme) -> None:
    """The codes that the weight stands for, given its scales; and whether it agrees with the scales."""
    assert scheme.weight is not None
    name, granularity = f"{part.module}.weight", scheme.weight.granularity
    whole, scale = found[name], found[f"{part.module}.weight_scale"]
    scales = granularity.join(scale.unsqueeze(-1).expand_as(granularity.split(whole)), len(whole))
    scales_NK = scales[part.rows, part.columns]
    codes = scheme.weight.format.round_to_grid(dense_NK.float() / scales_NK)
    whole[part.rows, part.columns] = codes
    exact, tolerance = codes.float() * scales_NK, torch.finfo(dense_NK.dtype).eps
    if not bool(((dense_NK.float() - exact).abs() <= tolerance * exact.abs()).all()):
        scale.fill_(float("nan"))


def _dense(layer: LinearBase) -> Tensor:
    """The weight that this layer multiplies with [N, K], without bias, in the type of its outputs."""
    rows = _identity(layer.input_size_per_partition, layer.params_dtype, _device(layer))
    return torch.cat([layer.quant_method.apply(layer, some, None) for some in rows]).t()


def _identity(size: int, dtype: torch.dtype, device: torch.device) -> Iterator[Tensor]:
    """The rows of the identity matrix, some at a time."""
    for first in range(0, size, ROWS_AT_A_TIME):
        rows = torch.zeros(min(ROWS_AT_A_TIME, size - first), size, dtype=dtype, device=device)
        rows.diagonal(first).fill_(1)
        yield rows


def _device(layer: nn.Module) -> torch.device:
    return next((tensor.device for tensor in (*layer.parameters(), *layer.buffers())), torch.device("cpu"))


def _layers(model: nn.Module, kind: type[Layer]) -> Iterator[tuple[Layer, list[Part]]]:
    """Every linear layer, or everything around one that adds adapters, with the matrices that vLLM fused in it."""
    fused = getattr(model, "packed_modules_mapping", {})
    for name, layer in model.named_modules():
        if isinstance(layer, kind):
            parent, _, leaf = name.removesuffix(".base_layer").rpartition(".")
            linear = layer.base_layer if isinstance(layer, BaseLinearLayerWithLoRA) else layer
            yield layer, _parts(linear, [f"{parent}.{member}" for member in fused.get(leaf, [leaf])])


def _parts(layer: LinearBase, modules: Sequence[str]) -> list[Part]:
    if isinstance(layer, RowParallelLinear):
        width = layer.input_size_per_partition
        return [Part(modules[0], slice(None), slice(None), slice(layer.tp_rank * width, (layer.tp_rank + 1) * width))]
    parts, first = [], 0
    for index, (module, height) in enumerate(zip(modules, layer.output_partition_sizes, strict=True)):
        # Where there are more workers than key/value heads, several hold the same ones.
        copies = layer.num_kv_head_replicas if isinstance(layer, QKVParallelLinear) and index > 0 else 1
        rank = layer.tp_rank // copies
        rows = slice(rank * height, (rank + 1) * height)
        parts.append(Part(module, slice(first, first := first + height), rows, slice(None)))
    return parts


def _vocabulary_rows(model: nn.Module, name: str) -> slice:
    """Which rows of the whole tensor a worker's parameter is: embeddings are divided among workers, norms are not."""
    indices = getattr(model.get_submodule(name.rpartition(".")[0]), "shard_indices", None)
    return slice(None) if indices is None else slice(indices.org_vocab_start_index, indices.org_vocab_end_index)
