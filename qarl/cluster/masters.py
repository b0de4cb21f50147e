"""Masters of which every rank holds some rows, as DTensors of placement Shard(0).

FSDP's `fully_shard` holds them so too, but gathers whole fp32 masters for every forward and backward pass. Here no
product reads a master: what is multiplied are the published codes, which every rank holds whole. So each rank
quantizes its own rows, and codes and scales are gathered once a version. Shape letters: T tokens, N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from qarl.cluster.exchange import Exchange
from qarl.errors import RunError
from qarl.ops.device import HOST
from qarl.ops.operand import quantize_weight
from qarl.quant import pack_int4, unpack_int4
from qarl.quant.qtensor import QTensor
from qarl.quant.scales import PerBlock
from qarl.quant.scheme import Scheme


class ShardedMasters:
    """Matrices are divided by rows; vectors are whole on every rank, and equal. Both are on `device`.

    All ranks call each method at the same time, for the same master.
    """

    def __init__(self, exchange: Exchange, device: torch.device = HOST) -> None:
        self._exchange = exchange
        self._device = device
        assert dist.group.WORLD is not None
        self._mesh = DeviceMesh.from_group(dist.group.WORLD, device.type)

    def shard(self, whole: Tensor) -> Tensor:
        """What this rank holds of a parameter, which may be elsewhere."""
        if whole.dim() < 2:
            return whole.to(self._device)
        rows = self._exchange.rows_of(len(whole))[self._exchange.index]
        own = whole[rows.start : rows.stop].to(self._device, copy=True)
        return DTensor.from_local(
            own, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )

    @contextmanager
    def gradients(self, *masters: Tensor) -> Iterator[list[Tensor]]:
        """Whole only within the block; then each rank adds the sum of all ranks' shares of its rows to its `.grad`."""
        shares = [torch.zeros(master.shape, device=master.device) for master in masters]
        yield shares
        for master in masters:
            _gradient_of(master).add_(self._exchange.reduce(shares.pop(0)))

    def add_rows(self, master: Tensor, rows_T: Tensor, grad_TK: Tensor) -> None:
        """Tokens' gradients are sent instead of a matrix as large as the vocabulary."""
        mine = self._exchange.rows_of(len(master))[self._exchange.index]
        gradient = _gradient_of(master)
        grads = self._exchange.ragged(grad_TK)
        for rows, grad in zip(self._exchange.ragged(rows_T), grads, strict=True):
            here = (rows >= mine.start) & (rows < mine.stop)
            gradient.index_add_(0, rows[here] - mine.start, grad[here])

    def quantize(self, master: Tensor, height: int, scheme: Scheme, name: str) -> QTensor:
        """Own rows, then everyone's codes and scales; blocks reach over rows, so that such a matrix is gathered first.

        Equal to the last bit to what one process makes of the same values. Every rank raises, if one has to.
        """
        assert scheme.weight is not None
        if isinstance(scheme.weight.granularity, PerBlock):
            return quantize_weight(self.whole(master)[:height], scheme, name)
        own = _local(master)
        count = len(own)
        rows = own if count else own.new_zeros(1, own.shape[1])  # of a low matrix a rank may have none
        try:
            part, failure = quantize_weight(rows, scheme, name), None
        except RunError as error:
            part, failure = quantize_weight(torch.zeros_like(rows), scheme, name), error
        # A scale that no weight has tells the others.
        scale = part.scale if failure is None else torch.full_like(part.scale, torch.nan)
        scales = self._exchange.gather(scale[:count], len(master))
        codes = self._gathered_codes(part.codes[:count], len(master), scheme)
        if not bool(scales.isfinite().all()):
            raise failure or RunError(f"{name}: non-finite values; they cannot be quantized")
        return QTensor(codes[:height], scales[:height], scheme)

    def _gathered_codes(self, own: Tensor, height: int, scheme: Scheme) -> Tensor:
        """Two 4-bit codes travel in a byte where a scheme is stored so."""
        if not scheme.packed:
            return self._exchange.gather(own, height)
        return unpack_int4(self._exchange.gather(pack_int4(own), height), own.shape[1])

    def whole(self, master: Tensor) -> Tensor:
        if not isinstance(master, DTensor):
            return master.detach()
        return self._exchange.gather(_local(master), len(master))

    def values(self, master: Tensor) -> Tensor | None:
        return None if isinstance(master, DTensor) else master.detach()


def _local(tensor: Tensor) -> Tensor:
    """This rank's part, without gradient, in the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _gradient_of(master: Tensor) -> Tensor:
    """This rank's rows of the gradient, zeros at first."""
    if master.grad is None:
        master.grad = torch.zeros_like(master.detach())
    return _local(master.grad)
