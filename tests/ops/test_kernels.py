"""Which kernels a process uses, and what is refused where the integer GEMM is not exact."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from qarl.errors import RunError
from qarl.ops import kernels as module
from qarl.ops import library
from qarl.ops.cpu import CpuKernels
from qarl.ops.kernels import integers_are_exact, kernels, require_exact_integers, using
from qarl.ops.operand import operand_of
from qarl.ops.reference import ReferenceKernels
from qarl.quant.qtensor import quantize
from qarl.quant.scheme import scheme_named


@pytest.fixture
def nothing_chosen_yet() -> Iterator[None]:
    """As in a new process; afterwards too, so that the next test finds this machine's kernels."""
    caches = (library.built, library.load, module._default, module.integers_are_exact)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def test_the_c_kernels_are_used_where_they_build():
    if library.load() is None:
        pytest.skip(f"no C kernels here: {library.built().reason}")
    assert isinstance(kernels(), CpuKernels)
    assert kernels() is kernels()


@pytest.mark.usefixtures("nothing_chosen_yet")
def test_without_a_compiler_the_reference_serves_and_one_warning_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setenv("CC", "/bin/false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING, "qarl"):
        chosen = [kernels() for _ in range(3)]
    assert [type(found) for found in chosen] == [ReferenceKernels] * 3
    assert len(caplog.records) == 1
    assert "/bin/false" in caplog.text


def test_using_holds_inside_its_block_and_nests():
    outer, inner, before = ReferenceKernels(), ReferenceKernels(), kernels()
    with using(outer):
        with using(inner):
            assert kernels() is inner
        assert kernels() is outer
    assert kernels() is before


def test_using_is_of_one_thread():
    before = kernels()
    with using(ReferenceKernels()), ThreadPoolExecutor(1) as another:
        assert another.submit(kernels).result() is before


def test_using_ends_with_an_error_too():
    before = kernels()
    with pytest.raises(ZeroDivisionError), using(ReferenceKernels()):
        _ = 1 / 0
    assert kernels() is before


@pytest.mark.usefixtures("nothing_chosen_yet")
def test_a_saturating_integer_gemm_is_found_out_and_refuses_integer_schemes_alone(monkeypatch: pytest.MonkeyPatch):
    exact = torch._int_mm

    def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """As on processors without VNNI, for the first pair: 8 bits made unsigned, two products summed in 16 bits."""
        pair = (a[:, :2].int() + 128) @ b[:2].int()
        return exact(a, b) - (pair - pair.clamp(-(2**15), 2**15 - 1))

    monkeypatch.setattr(torch, "_int_mm", saturating)
    weight = torch.randn(8, 16)
    with using(ReferenceKernels()):
        assert not integers_are_exact(kernels())
        with pytest.raises(RunError, match="not exact on this CPU"):
            require_exact_integers()
        with pytest.raises(RunError, match="use scheme 'none'"):
            operand_of([quantize(weight, scheme_named("w8a8-int8"), "w")], [None])
        for part in (weight, quantize(weight, scheme_named("fp8"), "w")):
            assert operand_of([part], [None]).dense().shape == (8, 16)


def test_the_integer_gemms_of_this_machine_are_exact():
    assert integers_are_exact(kernels())
    assert integers_are_exact(ReferenceKernels())
