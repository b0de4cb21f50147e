"""One learner of several, as `learner/ranks.py` describes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qarl.cluster.exchange import Exchange
from qarl.errors import RunError
from qarl.metrics import Metrics, merge
from qarl.optim.clipping import global_norm


class CrewRanks:
    """The ranks between which `exchange` goes."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self.index = exchange.index
        self.count = exchange.count

    def agree(self, failure: RunError | None) -> None:
        if bool(self._exchange.each(torch.tensor(failure is not None)).any()):
            words = [said for said in self._exchange.objects(None if failure is None else str(failure)) if said]
            raise RunError(words[0])

    def merged(self, metrics: Metrics) -> Metrics:
        return merge(self._exchange.objects(metrics))

    def add_up(self, parameters: Iterable[Tensor]) -> None:
        """In one message."""
        found = [parameter.grad for parameter in parameters if parameter.grad is not None]
        whole = [gradient for gradient in found if not isinstance(gradient, DTensor)]
        if whole:
            summed = self._exchange.total(torch.cat([gradient.flatten() for gradient in whole]))
            for gradient, total in zip(whole, summed.split([one.numel() for one in whole]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def norm_of(self, gradients: Sequence[Tensor]) -> float:
        """What every rank holds whole counts once."""
        mine = [one.to_local() for one in gradients if isinstance(one, DTensor)]
        if self.index == 0:
            mine += [one for one in gradients if not isinstance(one, DTensor)]
        norms = self._exchange.each(torch.tensor(global_norm(mine), dtype=torch.float64))
        return math.sqrt(sum(norm * norm for norm in norms.tolist()))

    def fetch(self, key: str, tensor: Tensor) -> Tensor:
        raise AssertionError("only a leader asks others for their parts")

    def place(self, values: Tensor | None, into: Tensor) -> None:
        if isinstance(into, DTensor):
            self._exchange.scatter(values, into.to_local(), len(into))
            return
        if values is not None:
            into.copy_(values)
        self._exchange.broadcast(into)
