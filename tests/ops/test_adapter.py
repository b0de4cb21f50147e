"""Adapters of siblings: their product and its gradient against float64, and rows that do not depend on others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qarl.ops.adapter import LowRank, adapter_of
from qarl.ops.kernels import kernels

pytestmark = pytest.mark.usefixtures("each_kernels")

T, K, HEIGHTS, RANK, SCALE = 7, 40, (24, 9, 33), 5, 1.7


def parts_of(*present: bool) -> list[LowRank | None]:
    return [
        LowRank(torch.randn(RANK, K, requires_grad=True), torch.randn(n, RANK, requires_grad=True)) if there else None
        for n, there in zip(HEIGHTS, present, strict=True)
    ]


def defined(y: Tensor, x: Tensor, parts: list[LowRank | None]) -> tuple[Tensor, list[Tensor]]:
    """In float64, with the leaves that have a gradient."""
    leaves: list[Tensor] = []
    columns = []
    for part, n in zip(parts, HEIGHTS, strict=True):
        if part is None:
            columns.append(torch.zeros(len(x), n, dtype=torch.float64))
            continue
        a, b = (tensor.detach().double().requires_grad_() for tensor in (part.a, part.b))
        leaves += [a, b]
        columns.append(SCALE * (x @ a.t() @ b.t()))
    return y + torch.cat(columns, 1), leaves


@pytest.mark.parametrize("present", [(True, True, True), (True, False, True), (False, False, True)], ids=str)
def test_value_and_gradients_are_those_of_float64(present: tuple[bool, ...]) -> None:
    parts, y, grad = parts_of(*present), torch.randn(T, sum(HEIGHTS)), torch.randn(T, sum(HEIGHTS))
    x = torch.randn(T, K, dtype=torch.float64, requires_grad=True)
    exact, leaves = defined(y.double(), x, parts)
    adapter = adapter_of(parts, HEIGHTS, SCALE)
    found = adapter.add_to_(y.clone(), x.detach().float())
    torch.testing.assert_close(found.double(), exact.detach(), rtol=1e-5, atol=1e-4)
    expected_x, *expected = torch.autograd.grad(exact, [x, *leaves], grad.double())
    grad_x = adapter.backward(grad, x.detach().float(), parts)
    torch.testing.assert_close(grad_x.double(), expected_x, rtol=1e-5, atol=1e-3)
    masters = [tensor for part in parts if part is not None for tensor in (part.a, part.b)]
    for master, theirs in zip(masters, expected, strict=True):
        assert master.grad is not None
        torch.testing.assert_close(master.grad.double(), theirs, rtol=1e-5, atol=1e-3)


def test_gradients_of_two_passes_add_up() -> None:
    parts, x, grad = parts_of(True, False, True), torch.randn(T, K), torch.randn(T, sum(HEIGHTS))
    adapter = adapter_of(parts, HEIGHTS, SCALE)
    adapter.backward(grad, x, parts)
    assert parts[0] is not None and parts[0].a.grad is not None
    once = parts[0].a.grad.clone()
    adapter.backward(grad, x, parts)
    torch.testing.assert_close(parts[0].a.grad, 2 * once)


def test_with_b_of_zeros_nothing_is_added() -> None:
    parts = [LowRank(torch.randn(RANK, K), torch.zeros(n, RANK)) for n in HEIGHTS]
    y = torch.randn(T, sum(HEIGHTS))
    assert torch.equal(adapter_of(parts, HEIGHTS, SCALE).add_to_(y.clone(), torch.randn(T, K)), y)


def test_a_row_alone_has_the_bits_of_a_row_in_a_batch() -> None:
    if not kernels().exact_matmul:
        pytest.skip("the reference's float products depend on the batch")
    adapter = adapter_of(parts_of(True, True, False), HEIGHTS, SCALE)
    x, y = torch.randn(300, K), torch.randn(300, sum(HEIGHTS))
    together = adapter.add_to_(y.clone(), x)
    for row in (0, 11, 299):
        assert torch.equal(adapter.add_to_(y[row : row + 1].clone(), x[row : row + 1])[0], together[row])


def test_what_is_multiplied_does_not_move_with_the_masters() -> None:
    parts, x, y = parts_of(True, True, True), torch.randn(T, K), torch.randn(T, sum(HEIGHTS))
    adapter = adapter_of(parts, HEIGHTS, SCALE)
    before = adapter.add_to_(y.clone(), x)
    with torch.no_grad():
        for part in parts:
            assert part is not None
            part.a.zero_()
            part.b.zero_()
    assert torch.equal(adapter.add_to_(y.clone(), x), before)
