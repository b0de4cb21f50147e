"""Which implementation of the operations this process uses and where, and whether the integer GEMM is exact there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

from qarl.errors import RunError
from qarl.ops import library
from qarl.ops.cpu import CpuKernels
from qarl.ops.device import HOST
from qarl.ops.reference import ReferenceKernels
from qarl.quant.formats import INT4, INT8, INT12, IntegerFormat

logger = logging.getLogger(__name__)

_chosen: ContextVar[ReferenceKernels | None] = ContextVar("chosen", default=None)
_device = [HOST]


def kernels() -> ReferenceKernels:
    """On the CPU the C kernels where they build, else the torch reference (said once); on a GPU those in Triton."""
    chosen = _chosen.get()
    return _default(_device[-1]) if chosen is None else chosen


def compute_on(device: torch.device) -> None:
    """From now on this process computes there; it is the CPU before. What is `using` others goes on with them.

    On a GPU torch's own sums (gradients of embeddings, backward GEMMs) get one order too: the same seed is to give the
    same weights.
    """
    _device[-1] = device
    is_gpu = device.type == "cuda"
    if is_gpu:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS asks for it
    torch.use_deterministic_algorithms(is_gpu, warn_only=True)
    # Every kernel writes all of its result.
    torch.utils.deterministic.fill_uninitialized_memory = not is_gpu  # type: ignore[attr-defined]


def require_exact_integers() -> None:
    """RunError where integer schemes would be silently wrong."""
    if not integers_are_exact(kernels()):
        raise RunError(
            "the integer GEMM is not exact on this CPU (it saturates 16-bit sums): schemes w8a8-int8 and w4a8-int8 "
            "would be silently wrong here; use scheme 'none', a weight-only scheme, or another machine"
        )


@contextmanager
def using(chosen: ReferenceKernels) -> Iterator[None]:
    """Use these kernels inside the block, whatever the default is; other threads go on with theirs."""
    before = _chosen.set(chosen)
    try:
        yield
    finally:
        _chosen.reset(before)


@cache
def _default(device: torch.device) -> ReferenceKernels:
    if device.type == "cuda":
        from qarl.ops.triton.kernels import TritonKernels  # which only some have installed

        return TritonKernels(device)
    loaded = library.load()
    if loaded is None:
        logger.warning("CPU kernels absent, using slow torch operations: %s", library.built().reason)
        return ReferenceKernels()
    return CpuKernels(loaded)


@cache
def integers_are_exact(chosen: ReferenceKernels) -> bool:
    """Prove the integer GEMM on its worst case: the largest codes over long reductions, at several batch sizes."""
    return all(
        _worst_case_is_exact(chosen, rows, k, activation, weight)
        for rows in (1, 2, 17, 64)
        for k in (64, 4096, 16384)
        for activation, weight in ((INT8, INT8), (INT8, INT4), (INT12, INT12))
    )


def _worst_case_is_exact(
    chosen: ReferenceKernels, rows: int, k: int, activation: IntegerFormat, weight: IntegerFormat
) -> bool:
    largest, heaviest = int(activation.largest), int(weight.largest)
    device = chosen.device
    codes = torch.full((rows, k), largest, dtype=activation.code_dtype, device=device)
    weights = torch.full((32, k), heaviest, dtype=weight.code_dtype, device=device)
    weights[1::2] = -heaviest
    packed = chosen.pack_codes(weights, weight)
    product = chosen.integer_matmul(
        codes, torch.ones(rows, device=device), packed, torch.ones(32, device=device), None, None
    )
    exact = [largest * heaviest * k, -largest * heaviest * k]
    expected = torch.tensor(exact, device=device).float().repeat(16)
    return torch.equal(product, expected.expand(rows, 32))
