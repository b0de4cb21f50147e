"""The other processes that train the same model, as far as a learner has to know of them.

A rank trains on its part of every batch, on micro-batches as many as any rank's, so that all hand over gradients of
the same masters at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from qarl.errors import RunError
from qarl.metrics import Metrics
from qarl.optim.clipping import global_norm


class Ranks(Protocol):
    """All methods but `fetch` are called by every rank at the same time."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def agree(self, failure: RunError | None) -> None:
        """Raise the first rank's failure on all of them; nothing where none has one."""
        ...

    def merged(self, metrics: Metrics) -> Metrics:
        """The metrics of all ranks together."""
        ...

    def add_up(self, parameters: Iterable[Tensor]) -> None:
        """Let gradients of parameters that every rank holds whole be the sums over the ranks."""
        ...

    def norm_of(self, gradients: Sequence[Tensor]) -> float:
        """2-norm of all gradients together, the same bits on every rank."""
        ...

    def fetch(self, key: str, tensor: Tensor) -> Tensor:
        """All values of a part of the learner's state, which is known to other ranks as `key`."""
        ...

    def place(self, values: Tensor | None, into: Tensor) -> None:
        """Set a part of the learner's state; `values` are whole, and None on ranks that do not lead."""
        ...


class Alone:
    """There is no other rank."""

    index, count = 0, 1

    def agree(self, failure: RunError | None) -> None:
        if failure is not None:
            raise failure

    def merged(self, metrics: Metrics) -> Metrics:
        return metrics

    def add_up(self, parameters: Iterable[Tensor]) -> None:
        """They are sums already."""

    def norm_of(self, gradients: Sequence[Tensor]) -> float:
        return global_norm(gradients)

    def fetch(self, key: str, tensor: Tensor) -> Tensor:
        return tensor.detach()

    def place(self, values: Tensor | None, into: Tensor) -> None:
        assert values is not None
        into.copy_(values)
