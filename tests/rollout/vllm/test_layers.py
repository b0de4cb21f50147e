"""Following the layers of a model; a model of vLLM's shape is enough."""

from typing import Any

import torch
from torch import Tensor, nn

from qarl.rollout.vllm.layers import LayerOutputs


class Layer(nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + 1, residual * 2


class Norm(nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + residual, residual


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model: Any = nn.Module()
        self.model.layers = nn.ModuleList([Layer(), Layer()])
        self.model.norm = Norm()

    def forward(self, hidden: Tensor) -> Tensor:
        residual = torch.ones_like(hidden)
        for layer in self.model.layers:
            hidden, residual = layer(hidden, residual)
        normed: Tensor = self.model.norm(hidden, residual)[0]
        return normed

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


def test_layers_of_several_forwards_are_one_sequence_and_nothing_is_followed_afterwards() -> None:
    model = Model()
    followed = LayerOutputs(model)
    chunks = torch.tensor([[0.0, 3.0], [5.0, 1.0], [2.0, 7.0]]).split(2)
    for chunk in chunks:
        model(chunk)
    found = followed.take()
    whole = torch.cat(chunks)
    # After the first layer hidden + 1 with a residual of 2, after the second hidden + 2 with 4.
    assert torch.equal(found["layers"], torch.stack([whole + 3, whole + 6]))
    assert found["best"].tolist() == [1, 0, 1]
    model(whole)
    assert len(followed._normed) == 2
