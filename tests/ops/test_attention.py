"""Rotation and attention as autograd sees them, against float64 autograd of plain torch formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qarl.ops.attention import Rotation, Store, attention, split_rotate, split_rotate_into
from qarl.ops.reference import Spans

pytestmark = pytest.mark.usefixtures("each_kernels")

HEADS, KV_HEADS, DIM, EPS = 6, 2, 24, 1e-3
ANGLES = torch.arange(64)[:, None] * torch.logspace(0, -3, DIM // 2)
ROTATION = Rotation(HEADS, KV_HEADS, DIM, EPS, ANGLES.cos(), ANGLES.sin())
POSITIONS = torch.tensor([0, 1, 2, 3, 40, 2, 3])
WIDTH = (HEADS + 2 * KV_HEADS) * DIM


def wide(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_(True) for tensor in tensors]


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * gain


def written_out(qkv: Tensor, gains: list[Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
    """Split, norm, and turn (element i, element i + C/2) as complex numbers; in float64."""
    q, k, v = qkv.view(len(qkv), -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], 1)
    if gains is not None:
        q, k = (normed(x, gain) for x, gain in zip((q, k), gains, strict=True))
    turn = torch.polar(torch.ones(len(qkv), 1, DIM // 2, dtype=torch.float64), ANGLES.double()[POSITIONS][:, None])

    def turned(x: Tensor) -> Tensor:
        product = torch.complex(*x.chunk(2, -1)) * turn
        return torch.cat([product.real, product.imag], -1)

    return turned(q), turned(k), v


def assert_same(found: Tensor, exact: Tensor) -> None:
    assert exact.abs().max() > 0
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("with_norms", [False, True])
def test_split_rotate_has_the_value_and_gradients_of_its_formula(with_norms):
    leaves = [torch.randn(len(POSITIONS), WIDTH), torch.randn(DIM), torch.randn(DIM)][: 3 if with_norms else 1]
    leaves = [leaf.requires_grad_(True) for leaf in leaves]
    wide_leaves = wide(*leaves)
    found = split_rotate(leaves[0], POSITIONS, ROTATION, (leaves[1], leaves[2]) if with_norms else None)
    exact = written_out(wide_leaves[0], wide_leaves[1:] if with_norms else None)
    grads = [torch.randn_like(part) for part in found]
    for mine, theirs in zip(found, exact, strict=True):
        assert_same(mine.detach(), theirs.detach())
    gradients = torch.autograd.grad(found, leaves, grads)
    exact_gradients = torch.autograd.grad(exact, wide_leaves, [grad.double() for grad in grads])
    for gradient, exact_gradient in zip(gradients, exact_gradients, strict=True):
        assert_same(gradient, exact_gradient)


def test_keys_and_values_rounded_as_for_an_int8_store_have_the_gradients_of_unrounded_ones():
    leaves = [leaf.requires_grad_(True) for leaf in (torch.randn(len(POSITIONS), WIDTH), *torch.randn(2, DIM))]
    q, keys, values = split_rotate(leaves[0], POSITIONS, replace(ROTATION, rounds_kv=True), (leaves[1], leaves[2]))
    wide_leaves = wide(*leaves)
    exact = written_out(wide_leaves[0], wide_leaves[1:])
    assert_same(q.detach(), exact[0].detach())
    for mine, theirs in zip((keys, values), exact[1:], strict=True):
        steps = theirs.abs().amax(-1, keepdim=True) / 127
        assert ((mine - theirs).abs() <= 0.501 * steps).all() and not torch.equal(mine.double(), theirs)
        assert ((mine / steps).round() - mine / steps).abs().max() < 1e-3
    grads = [torch.randn_like(part) for part in exact]
    gradients = torch.autograd.grad((q, keys, values), leaves, [grad.float() for grad in grads])
    for gradient, exact_gradient in zip(gradients, torch.autograd.grad(exact, wide_leaves, grads), strict=True):
        assert_same(gradient, exact_gradient)


def test_into_a_store_the_same_bits_go_to_the_rows_of_the_tokens():
    qkv, gains = torch.randn(len(POSITIONS), WIDTH), (torch.randn(DIM), torch.randn(DIM))
    q, keys, values = split_rotate(qkv, POSITIONS, ROTATION, gains)
    slots = torch.tensor([9, 0, 3, 8, 1, 12, 5])
    store = Store(torch.zeros(14, KV_HEADS, DIM), torch.zeros(14, KV_HEADS, DIM), slots)
    q_into, all_keys, all_values = split_rotate_into(store, qkv, POSITIONS, ROTATION, gains)
    assert torch.equal(q_into, q)
    assert isinstance(all_keys, Tensor) and isinstance(all_values, Tensor)
    assert torch.equal(all_keys[slots], keys)
    assert torch.equal(all_values[slots], values)
    rest = [row for row in range(14) if row not in slots]
    assert not all_keys[rest].any() and not all_values[rest].any()


def test_attention_has_the_value_and_gradients_of_masked_softmax():
    """A prompt of 4 tokens with two continuations of 3 and 5, which do not see each other."""
    starts, lengths = torch.tensor([0, 0, 4, 0, 7]), torch.tensor([4, 4, 3, 4, 5])
    owners = torch.tensor([0] * 4 + [1] * 3 + [2] * 5)
    visible = torch.tensor([1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9])
    spans = Spans(owners, visible, torch.tensor([0, 1, 3, 5]), starts, lengths, torch.tensor([0, 12]), 9)
    is_seen = torch.zeros(12, 12, dtype=torch.bool)
    is_seen[:4, :4] = is_seen[4:7, 4:7] = True
    is_seen[7:, 7:] = True
    is_seen = is_seen.tril()
    is_seen[4:, :4] = True
    assert is_seen.sum(1).tolist() == visible.tolist()

    leaves = q32, keys32, values32 = [
        torch.randn(12, heads, DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    wide_leaves = q, keys, values = wide(*leaves)
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
    scores = torch.einsum("thc,jhc->htj", q, keys) * DIM**-0.5
    exact = torch.einsum("htj,jhc->thc", scores.masked_fill(~is_seen, -torch.inf).softmax(-1), values)

    found = attention(q32, keys32, values32, spans)
    assert_same(found.detach(), exact.detach())
    grad = torch.randn(12, DIM, HEADS).transpose(1, 2)  # not contiguous, as autograd may hand it over
    theirs = torch.autograd.grad(exact, wide_leaves, grad.double())
    for gradient, exact_gradient in zip(torch.autograd.grad(found, leaves, grad), theirs, strict=True):
        assert_same(gradient, exact_gradient)
