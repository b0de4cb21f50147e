"""Update-aware quantization (UAQ of QuRL, arXiv 2602.13953): a factor goes from matrices into the norms they read.

W x = (W / s)(s x): the function stays, and so do the codes, for scales follow their matrix. An optimizer whose step
does not depend on the gradient's size, as AdamW's and Muon's, then moves the matrix by s times as much of a code.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from qarl.models.config import ModelConfig

READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}
"""All that reads each norm of a layer. The final norm is left out: what reads it, the head, may be the embedding."""


def foldable(config: ModelConfig, quantized: Collection[str]) -> dict[str, tuple[str, ...]]:
    """The gains that a factor may go into, by parameter name, each with the weights that read its norm.

    Only norms all of whose readers are `quantized` modules count.
    """
    found = {}
    for layer in range(config.num_layers):
        for norm, readers in READERS.items():
            modules = [f"model.layers.{layer}.{reader}" for reader in readers]
            if all(module in quantized for module in modules):
                found[f"model.layers.{layer}.{norm}.weight"] = tuple(f"{module}.weight" for module in modules)
    return found


@torch.no_grad()
def fold(tensors: Mapping[str, Tensor], gains: Mapping[str, Collection[str]], factor: float) -> None:
    """Multiply these gains by `factor` and divide the weights that read their norms by it, in place.

    Biases stay: they are added to the product. In place, since a model may not fit in memory twice.
    """
    for gain, weights in gains.items():
        tensors[gain].mul_(factor)
        for weight in weights:
            tensors[weight].div_(factor)
