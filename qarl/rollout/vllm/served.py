"""What a vLLM worker really serves, read back under Hugging Face names.

Kernels keep weights in layouts of their own (Marlin, cutlass, oneDNN), some behind a handle. So a layer is asked what
it multiplies with: its product with the identity is its weight, codes times scales, whatever the layout. From that the
codes are exact: an output of bfloat16 is off by 2^-8 at most, and of the largest code 127 that is less than a half.
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
from qarl.quant.formats import IntegerFormat
from qarl.quant.scales import PerRow
from qarl.records import Snapshot

ROWS_AT_A_TIME = 512
"""Of the identity: bounds the memory of a reading."""

COLUMNS_OF_HEAD = 64

Products = Sequence[tuple[int, Tensor]]
"""Rows of K that a layer was asked for at a time: the first one's number, and their products [rows, N]."""


Layer = TypeVar("Layer", LinearBase, BaseLinearLayerWithLoRA)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One Hugging Face matrix inside a worker's layer: rows of the layer's weight, and of the whole matrix."""

    module: str
    of_layer: slice
    rows: slice
    columns: slice


@torch.no_grad()
def served(model: Any, received: Snapshot) -> dict[str, Tensor]:
    """The tensors of this version as the worker has them; what other workers hold is left as it was received.

    `received` holds codes as `<module>.weight`, scales, and floats in the type they are served in. A scale that the
    products do not agree with is NaN. KeyError for a tensor that the model has no place for.
    """
    found, seen = dict(received.tensors), set()
    for layer, parts in _layers(model, LinearBase):
        products = _products(layer)
        for part in parts:
            name = f"{part.module}.weight"
            scheme = received.schemes.get(part.module)
            if scheme is None:
                found[name] = _replaced(found[name], part, _dense(products)[part.of_layer])
            elif not _multiplies(products, part, received, scheme_named(scheme)):
                found |= _served_codes(products, part, received, scheme_named(scheme))
            if (bias := f"{part.module}.bias") in found:
                found[bias] = found[bias].clone()
                found[bias][part.rows] = layer.bias[part.of_layer].cpu()
            seen |= {name, f"{name}_scale", bias}
    parameters = dict(model.named_parameters())
    for name in received.tensors.keys() - seen:
        found[name] = found[name].clone()
        rows = found[name][_vocabulary_rows(model, name)]
        rows.copy_(parameters[name][: len(rows)])
    return found | _served_head(model, received)


def _served_head(model: Any, received: Snapshot) -> dict[str, Tensor]:
    """The weight that logits are made with, where that is not what was received: it may be a copy of the embeddings.

    Looked at in COLUMNS_OF_HEAD of its columns, others at every version: a copy that was left behind differs in most.
    """
    name = "lm_head.weight" if "lm_head.weight" in received.tensors else "model.embed_tokens.weight"
    sent = received.tensors[name]
    chosen = torch.randperm(sent.shape[1], generator=torch.Generator().manual_seed(received.version))[:COLUMNS_OF_HEAD]
    rows = torch.zeros(len(chosen), sent.shape[1], dtype=sent.dtype)
    rows[torch.arange(len(chosen)), chosen] = 1
    product = model.compute_logits(rows.to(_device(model))).t().to(sent.dtype).cpu()
    if torch.equal(product, sent[:, chosen]):
        return {}
    other = sent.clone()
    other[:, chosen] = product
    return {name: other}


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


def _multiplies(products: Products, part: Part, received: Snapshot, scheme: Scheme) -> bool:
    """Whether these are products of integer codes and scales as received; of other formats this is not known."""
    assert scheme.weight is not None
    grid = scheme.weight.format
    if not isinstance(grid, IntegerFormat):
        return False
    codes_NK = received.tensors[f"{part.module}.weight"][part.rows, part.columns]
    scales_NK = _scales(received, part, scheme)
    bound = min(0.5, grid.largest * half_a_step(products[0][1].dtype))
    for first, product_RN in products:
        some = slice(first, first + len(product_RN))
        apart = product_RN[:, part.of_layer].float().cpu()
        apart.div_(scales_NK[:, some].t()).sub_(codes_NK[:, some].t())
        low, high = torch.aminmax(apart)
        if not max(-float(low), float(high)) < bound:
            return False
    return True


def _served_codes(products: Products, part: Part, received: Snapshot, scheme: Scheme) -> dict[str, Tensor]:
    """The codes that the products stand for, given the scales; and NaN for scales that they do not agree with."""
    assert scheme.weight is not None
    name = f"{part.module}.weight"
    dense_NK, scales_NK = _dense(products)[part.of_layer], _scales(received, part, scheme)
    codes = scheme.weight.format.round_to_grid(dense_NK.float() / scales_NK)
    exact, tolerance = codes.float() * scales_NK, half_a_step(dense_NK.dtype)
    agrees = bool(((dense_NK.float() - exact).abs() <= tolerance * exact.abs()).all())
    scale = received.tensors[f"{name}_scale"]
    return {
        name: _replaced(received.tensors[name], part, codes),
        f"{name}_scale": scale if agrees else torch.full_like(scale, float("nan")),
    }


def half_a_step(dtype: torch.dtype) -> float:
    """The largest relative error of rounding to this type, and a little for what was rounded before."""
    return torch.finfo(dtype).eps / 2 * 1.001 + 2.0**-21


def _scales(received: Snapshot, part: Part, scheme: Scheme) -> Tensor:
    """The scale of every element [N, K] of a part, without memory for each where a row has one."""
    assert scheme.weight is not None
    granularity, scale = scheme.weight.granularity, received.tensors[f"{part.module}.weight_scale"]
    whole = received.tensors[f"{part.module}.weight"]
    if isinstance(granularity, PerRow):
        return scale.expand(whole.shape)[part.rows, part.columns]
    shared = scale.unsqueeze(-1).expand_as(granularity.split(whole))
    return granularity.join(shared, len(whole))[part.rows, part.columns]


def _replaced(whole: Tensor, part: Part, of_worker: Tensor) -> Tensor:
    other = whole.clone()
    other[part.rows, part.columns] = of_worker.to(whole.dtype)
    return other


def _dense(products: Products) -> Tensor:
    """The weight that is multiplied with [N, K], in the type of the products."""
    return torch.cat([product for _, product in products]).t().cpu()


def _products(layer: LinearBase) -> Products:
    """The layer's products, without bias, with the rows of the identity matrix, some rows at a time."""
    width, dtype, device = layer.input_size_per_partition, layer.params_dtype, _device(layer)
    found = []
    for first in range(0, width, ROWS_AT_A_TIME):
        rows = torch.zeros(min(ROWS_AT_A_TIME, width - first), width, dtype=dtype, device=device)
        rows.diagonal(first).fill_(1)
        found.append((first, layer.quant_method.apply(layer, rows, None)))
    return found


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
