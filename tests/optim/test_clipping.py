"""Global norm clipping, numbers by hand."""

import math

import pytest
import torch

from qarl.optim import clip_grad_norm


def parameter(gradient: object, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    grad = torch.tensor(gradient, dtype=dtype)
    weight = torch.zeros_like(grad).requires_grad_()
    weight.grad = grad
    return weight


def test_the_norm_is_that_of_all_gradients_together_and_all_shrink_alike() -> None:
    matrix, scalar = parameter([[3.0, 0.0], [0.0, 0.0]]), parameter(4.0)
    assert clip_grad_norm([matrix, scalar], max_norm=1.0) == 5.0
    assert matrix.grad is not None and scalar.grad is not None
    assert matrix.grad.tolist() == [[pytest.approx(0.6), 0.0], [0.0, 0.0]]
    assert scalar.grad.item() == pytest.approx(0.8)


@pytest.mark.parametrize("max_norm", [5.0, 6.0])
def test_gradients_within_the_bound_keep_every_bit(max_norm: float) -> None:
    weight = parameter([3.0, 4.0])
    assert clip_grad_norm([weight], max_norm) == 5.0
    assert weight.grad is not None and weight.grad.tolist() == [3.0, 4.0]


def test_parameters_without_gradient_do_not_count() -> None:
    idle = torch.zeros(3, requires_grad=True)
    assert clip_grad_norm([idle, parameter([3.0, 4.0])], 10.0) == 5.0
    assert idle.grad is None
    assert clip_grad_norm([idle], 1.0) == 0.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_non_finite_norm_is_returned_and_nothing_is_touched(bad: float) -> None:
    sick, healthy = parameter([bad, 1.0]), parameter([7.0])
    assert not math.isfinite(clip_grad_norm([healthy, sick], 1.0))
    assert healthy.grad is not None and healthy.grad.tolist() == [7.0]


def test_a_large_embedding_does_not_lose_accuracy() -> None:
    # One fp32 accumulation over all 16.8 million squares is wrong in the third digit.
    weight = torch.zeros(4096, 4096, requires_grad=True)
    weight.grad = torch.full((4096, 4096), 0.1)
    expected = 4096 * float(torch.tensor(0.1))
    assert clip_grad_norm([weight], 1e9) == pytest.approx(expected, rel=1e-5)


def test_half_precision_gradients_are_measured_in_fp32() -> None:
    # 80000 overflows fp16.
    assert clip_grad_norm([parameter([48000.0, 64000.0], torch.float16)], 1e9) == 80000.0
