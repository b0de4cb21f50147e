"""Rows of the embedding, whose gradient is added where they came from.

Shape letters: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qarl.ops.gradient import gradient_of


def embedding(token_ids_T: Tensor, weight_VD: Tensor) -> Tensor:
    """The tokens' rows [T, D]. The gradient touches those rows alone, not a tensor as large as the vocabulary."""
    return _Embed.apply(token_ids_T, weight_VD)  # type: ignore[no-any-return]


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token_ids: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.weight = weight
        return torch.nn.functional.embedding(token_ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[None, None]:
        (token_ids,) = ctx.saved_tensors
        gradient_of(ctx.weight).index_add_(0, token_ids, grad_TD)
        return None, None
