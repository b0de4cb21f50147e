"""Which implementation of the operations this process uses, and whether the integer GEMM is exact here."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from qarl.errors import RunError
from qarl.ops import library
from qarl.ops.cpu import CpuKernels
from qarl.ops.reference import ReferenceKernels

logger = logging.getLogger(__name__)

_chosen: list[ReferenceKernels] = []


def kernels() -> ReferenceKernels:
    """The C kernels where they build, else the torch reference (said once). Chosen at the first call."""
    return _chosen[-1] if _chosen else _default()


def require_exact_int8() -> None:
    """RunError where integer schemes would be silently wrong."""
    if not int8_is_exact():
        raise RunError(
            "torch's integer GEMM is not exact on this CPU (it saturates 16-bit sums): schemes w8a8-int8 and w4a8-int8 "
            "would be silently wrong here; use scheme 'none', a weight-only scheme, or another machine"
        )


@contextmanager
def using(chosen: ReferenceKernels) -> Iterator[None]:
    """Use these kernels inside the block, whatever the default is."""
    _chosen.append(chosen)
    try:
        yield
    finally:
        _chosen.pop()


@cache
def _default() -> ReferenceKernels:
    loaded = library.load()
    if loaded is None:
        logger.warning("CPU kernels absent, using slow torch operations: %s", library.built().reason)
        return ReferenceKernels()
    return CpuKernels(loaded)


@cache
def int8_is_exact() -> bool:
    """Prove the integer GEMM on its worst case: all codes at +-127 over long reductions, several batch sizes."""
    for rows in (1, 2, 17, 64):
        for k in (64, 4096, 16384):
            ones = torch.full((rows, k), 127, dtype=torch.int8)
            signs = torch.full((32, k), 127, dtype=torch.int8)
            signs[1::2] = -127
            product = torch._int_mm(ones, signs.t())
            if not torch.equal(product, signs.sign().int()[:, 0].expand(rows, 32) * (127 * 127 * k)):
                return False
    return True
