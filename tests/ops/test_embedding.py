"""Rows of the embedding and where their gradient goes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qarl.ops.embedding import embedding


def test_rows_and_gradient_are_those_of_torch():
    weight = torch.randn(11, 6, requires_grad=True)
    ids, grad = torch.tensor([3, 0, 3, 10]), torch.randn(4, 6)
    found = embedding(ids, weight)
    assert torch.equal(found, weight[ids])
    found.backward(grad)
    exact = weight.detach().double().requires_grad_()
    F.embedding(ids, exact).backward(grad.double())
    assert weight.grad is not None and exact.grad is not None
    torch.testing.assert_close(weight.grad.double(), exact.grad, rtol=1e-6, atol=0)


def test_gradients_are_added_to_what_there_is():
    weight = torch.randn(5, 2, requires_grad=True)
    for _ in range(2):
        embedding(torch.tensor([1, 1]), weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[0, 0], [4, 4], [0, 0], [0, 0], [0, 0]]
