"""Rows of the embedding, whose gradient is added where they came from.

Shape letters: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qarl.ops.masters import WHOLE, Masters


def embedding(token_ids_T: Tensor, weight: Tensor, table_VD: Tensor | None = None, holder: Masters = WHOLE) -> Tensor:
    """The tokens' rows [T, D]. The gradient touches those rows alone, not a tensor as large as the vocabulary.

    They are read from `table_VD`, where the master `weight` is not all in memory here; `holder` is who holds it.
    """
    table_VD = weight.detach() if table_VD is None else table_VD
    return _Embed.apply(holder, token_ids_T, table_VD, weight)  # type: ignore[no-any-return]


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, holder: Masters, token_ids: Tensor, table: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(token_ids)
        ctx.holder, ctx.weight = holder, weight
        return torch.nn.functional.embedding(token_ids, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[None, None, None, None]:
        (token_ids,) = ctx.saved_tensors
        ctx.holder.add_rows(ctx.weight, token_ids, grad_TD)
        return None, None, None, None
