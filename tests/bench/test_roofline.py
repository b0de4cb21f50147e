"""Which of several GEMMs and sizes is a machine's best; how good that is, is the machine's business."""

import pytest
import torch

from qarl.bench import roofline
from qarl.ops.kernels import using
from qarl.ops.reference import ReferenceKernels


@pytest.mark.parametrize(
    ("scheme", "arithmetic"),
    [
        ("none", "fp32"),
        ("w8a8-int8", "int8"),
        ("w4a8-int8", "int8"),
        ("w4a16", "fp32"),
        ("fp8", "fp32"),  # codes are multiplied as the fp32 values they stand for
    ],
)
def test_a_scheme_is_measured_by_the_arithmetic_of_its_gemms(
    monkeypatch: pytest.MonkeyPatch, scheme: str, arithmetic: str
) -> None:
    assert roofline.arithmetic_of(scheme) == arithmetic
    monkeypatch.setattr(roofline, "best_gemm_rate", lambda chosen: {"int8": 1.0, "fp32": 2.0}[chosen])
    assert roofline.measured_peak(scheme) == {"int8": 1.0, "fp32": 2.0}[arithmetic]


@pytest.mark.parametrize("arithmetic", ["int8", "fp32"])
def test_the_peak_is_the_best_of_both_gemms_and_all_sizes(monkeypatch: pytest.MonkeyPatch, arithmetic: str) -> None:
    small, large = 2 * 32 * 128 * 128, 2 * 64 * 256 * 256
    seconds = iter([2.0, 0.5, 1.0, 0.25])  # ours on both sizes, torch's on both
    monkeypatch.setattr(roofline, "best_seconds", lambda work: next(seconds))
    assert roofline.best_gemm_rate(arithmetic) == max(large / 2.0, small / 0.5, large / 1.0, small / 0.25)
    assert next(seconds, None) is None


def test_ours_is_the_peak_where_torch_is_slow_and_torch_is_not_tried_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 1.0, 9.0])  # ours on both sizes, torch's on the first
    monkeypatch.setattr(roofline, "best_seconds", lambda work: next(seconds))
    assert roofline.best_gemm_rate("int8") == 2 * 64 * 256 * 256
    assert next(seconds, None) is None


def test_all_gemms_multiply_what_they_are_said_to() -> None:
    for gemm in (roofline.our_int8, roofline.torch_int8, roofline.our_fp32, roofline.torch_fp32):
        product = gemm(3, 64, 32)()
        assert isinstance(product, torch.Tensor) and product.shape == (3, 32)
        assert bool((product != 0).any())


def test_without_compiled_kernels_there_is_a_roofline_too() -> None:
    with using(ReferenceKernels()):
        assert roofline.best_gemm_rate("int8") > 0.0


def test_a_copy_moves_bytes() -> None:
    assert roofline.copy_bandwidth() > 0.0
