"""What the layers of a vLLM worker give for some tokens, for a comparison with the learner's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

LAYERS, BEST = "layers", "best"


class LayerOutputs:
    """Follows a model's forward passes until `take`: hidden states after every layer, the residual included."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._outputs: list[list[Tensor]] = [[] for _ in model.model.layers]
        self._normed: list[Tensor] = []
        self._hooks = [
            layer.register_forward_hook(self._keep(outputs))
            for layer, outputs in zip(model.model.layers, self._outputs, strict=True)
        ]
        self._hooks.append(model.model.norm.register_forward_hook(self._keep_normed))

    @torch.no_grad()
    def take(self) -> dict[str, Tensor]:
        """Outputs of every layer `layers` [L, T, D] fp32, and the likeliest next token `best` [T] after each."""
        for hook in self._hooks:
            hook.remove()
        layers = torch.stack([torch.cat(outputs) for outputs in self._outputs])
        best = torch.cat([self._model.compute_logits(rows).argmax(-1) for rows in torch.cat(self._normed).split(256)])
        return {LAYERS: layers.float().cpu(), BEST: best.cpu()}

    def _keep(self, outputs: list[Tensor]) -> Any:
        def keep(layer: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
            hidden, residual = output
            outputs.append(hidden.float() + residual.float())

        return keep

    def _keep_normed(self, norm: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        self._normed.append(output[0].clone())
