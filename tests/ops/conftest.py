"""The compiled kernels, and each implementation in turn as the one in use."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from functools import cache

import pytest

from qarl.ops import library
from qarl.ops.cpu import CpuKernels
from qarl.ops.kernels import using
from qarl.ops.reference import ReferenceKernels


@pytest.fixture(params=["native", "baseline"])
def cpu(request: pytest.FixtureRequest) -> CpuKernels:
    return compiled(request.param)


@pytest.fixture(params=["native", "baseline", "reference", pytest.param("triton", marks=pytest.mark.triton)])
def each_kernels(request: pytest.FixtureRequest) -> Iterator[ReferenceKernels]:
    """For operations that must hold with every implementation."""
    chosen: ReferenceKernels
    if request.param == "triton":
        chosen = request.getfixturevalue("triton_kernels")
    else:
        chosen = ReferenceKernels() if request.param == "reference" else compiled(request.param)
    with using(chosen):
        yield chosen


def compiled(kind: str) -> CpuKernels:
    """The kernels for this CPU or, on x86, those for the oldest one: vectors of four, and no dot products."""
    loaded = library.load()
    if loaded is None:
        pytest.skip(f"no C kernels here: {library.built().reason}")
    if kind == "native":
        return CpuKernels(loaded)
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("a baseline is known for x86 only")
    return CpuKernels(baseline_library())


@cache
def baseline_library() -> ctypes.CDLL:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "FLAGS", tuple(flag.replace("native", "x86-64") for flag in library.FLAGS))
        found = library.build()
    assert found.path is not None, found.reason
    return library.open_library(found.path)
