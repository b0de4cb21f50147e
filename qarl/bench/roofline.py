"""What this machine can do at best: GEMM operations and copied bytes a second, measured.

The best rate is that of whatever is fastest here, torch's GEMMs or ours: torch's integer GEMM takes 50 times longer
than ours on a CPU without VNNI, and ours is not made for large fp32 products. Shape letters: M rows, K in, N out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from qarl.bench.timing import best_seconds
from qarl.ops.kernels import kernels
from qarl.ops.operand import is_integer
from qarl.quant import scheme_named

Arithmetic = Literal["int8", "fp32"]

PEAK_SIZES = ((256, 576, 1536), (2048, 576, 1536), (512, 2048, 2048), (1024, 4096, 4096))
"""(M, K, N) of GEMMs among which a machine's best rate is looked for, the smallest first."""

HOPELESS = 8
"""A GEMM that is this many times slower than the best so far is not tried on larger sizes: it would take minutes."""


def measured_peak(scheme: str) -> float:
    """Best rate, in operations a second, of the arithmetic in which the scheme's GEMMs run."""
    return best_gemm_rate(arithmetic_of(scheme))


def arithmetic_of(scheme: str) -> Arithmetic:
    """int8 where weights and activations are integer codes; weight-only schemes and fp8 multiply in fp32."""
    return "int8" if is_integer(scheme_named(scheme)) else "fp32"


def best_gemm_rate(arithmetic: Arithmetic) -> float:
    """Best rate of ours and torch's over `PEAK_SIZES`."""
    best = 0.0
    for gemm in GEMMS[arithmetic]:
        for m, k, n in PEAK_SIZES:
            rate = gemm_rate(gemm, m, k, n)
            best = max(best, rate)
            if rate * HOPELESS < best:
                break
    return best


def gemm_rate(gemm: Callable[[int, int, int], Callable[[], object]], m: int, k: int, n: int) -> float:
    """Operations a second of one of `GEMMS` at one size."""
    return 2 * m * k * n / best_seconds(waited_for(gemm(m, k, n)))


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.ones(1 << 26, device=kernels().device)  # zeros would be one page of the system's, read over and over
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / best_seconds(waited_for(lambda: target.copy_(source)))


def our_int8(m: int, k: int, n: int) -> Callable[[], object]:
    codes, weight = random_codes(m, k), kernels().pack_codes(random_codes(n, k))
    row_scales, column_scales = (torch.ones(size, device=codes.device) for size in (m, n))
    return lambda: kernels().integer_matmul(codes, row_scales, weight, column_scales, None, None)


def torch_int8(m: int, k: int, n: int) -> Callable[[], object]:
    codes, weight = random_codes(m, k), random_codes(n, k).t()
    return lambda: torch._int_mm(codes, weight)


def our_fp32(m: int, k: int, n: int) -> Callable[[], object]:
    x, packed = normal(m, k), kernels().pack(normal(n, k))
    return lambda: kernels().matmul(x, packed, n, None, None)


def torch_fp32(m: int, k: int, n: int) -> Callable[[], object]:
    x, weight = normal(m, k), normal(n, k)
    return lambda: x @ weight.t()


def random_codes(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-127, 128, (rows, columns), dtype=torch.int8, device=kernels().device)


def normal(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, device=kernels().device)


def waited_for(work: Callable[[], object]) -> Callable[[], object]:
    """The work to its end: a GPU's calls return before."""
    if kernels().device.type == "cpu":
        return work

    def whole_work() -> None:
        work()
        torch.cuda.synchronize()

    return whole_work


GEMMS: dict[Arithmetic, tuple[Callable[[int, int, int], Callable[[], object]], ...]] = {
    "int8": (our_int8, torch_int8),
    "fp32": (our_fp32, torch_fp32),
}
