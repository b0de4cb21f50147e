"""The compiled kernels, and each implementation in turn as the one in use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qarl.ops import library
from qarl.ops.cpu import CpuKernels
from qarl.ops.kernels import using
from qarl.ops.reference import ReferenceKernels


@pytest.fixture
def cpu() -> CpuKernels:
    loaded = library.load()
    if loaded is None:
        pytest.skip(f"no C kernels here: {library.built().reason}")
    return CpuKernels(loaded)


@pytest.fixture(params=["cpu", "reference"])
def each_kernels(request: pytest.FixtureRequest) -> Iterator[ReferenceKernels]:
    """For operations that must hold with both implementations."""
    chosen = request.getfixturevalue("cpu") if request.param == "cpu" else ReferenceKernels()
    with using(chosen):
        yield chosen
