"""Who holds the master weights: this process all of them, or some rows of every matrix while others hold the rest.

Operations multiply with what was published (`operand.py`) and meet a master twice: when it is quantized, and when its
gradient is added up. Both go through here, so that no operation knows how masters are held.
Shape letters: T rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from torch import Tensor

from qarl.ops.gradient import gradient_of
from qarl.ops.operand import quantize_weight
from qarl.quant.qtensor import QTensor
from qarl.quant.scheme import Scheme


class Masters(Protocol):
    def gradients(self, *masters: Tensor) -> AbstractContextManager[list[Tensor]]:
        """Buffers of the masters' whole shapes, to which a backward pass adds its share in place; they are taken back
        at the end of the block, and not to be read after it.
        """
        ...

    def add_rows(self, master: Tensor, rows_T: Tensor, grad_TK: Tensor) -> None:
        """Add to the gradient of these rows of a master, which may be few of many, and the same one several times."""
        ...

    def quantize(self, master: Tensor, height: int, scheme: Scheme, name: str) -> QTensor:
        """The first `height` rows of a master, quantized. RunError naming `name` if a value is not finite."""
        ...

    def whole(self, master: Tensor) -> Tensor:
        """All values of a master, without gradient."""
        ...

    def values(self, master: Tensor) -> Tensor | None:
        """All values of a master if they are in memory here, valid until the next update; else None."""
        ...


class WholeMasters:
    """This process holds every master, and its gradient in `.grad`."""

    @contextmanager
    def gradients(self, *masters: Tensor) -> Iterator[list[Tensor]]:
        yield [gradient_of(master) for master in masters]

    def add_rows(self, master: Tensor, rows_T: Tensor, grad_TK: Tensor) -> None:
        gradient_of(master).index_add_(0, rows_T, grad_TK)

    def quantize(self, master: Tensor, height: int, scheme: Scheme, name: str) -> QTensor:
        return quantize_weight(master.detach()[:height], scheme, name)

    def whole(self, master: Tensor) -> Tensor:
        return master.detach()

    def values(self, master: Tensor) -> Tensor | None:
        return master.detach()


WHOLE = WholeMasters()
