"""Projections and their gradient, against float64 autograd of the straight-through formula written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qarl.ops.linear import Norm, Projection
from qarl.ops.operand import operand_of, quantize_weight
from qarl.ops.reference import Rounding
from qarl.quant.formats import INT8
from qarl.quant.qtensor import dequantize_activations, quantize_activations
from qarl.quant.scheme import SCHEMES, Quantizer, Scheme, scheme_named

pytestmark = pytest.mark.usefixtures("each_kernels")

T, K, EPS = 7, 128, 1e-3
HEIGHTS = (128, 33)

every_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=lambda scheme: scheme.name)


def projection_of(scheme: Scheme, biased: tuple[bool, ...] = (False, True)) -> Projection:
    """Two siblings, by default the second alone with a bias, serving their own weights under a scheme."""
    linears = [nn.Linear(K, height, bias=has_bias) for height, has_bias in zip(HEIGHTS, biased, strict=True)]
    projection = Projection(["layer.a", "layer.b"], linears)
    weights = [linear.weight.detach() for linear in linears]
    parts = [quantize_weight(weight, scheme, "w") if scheme.quantized else weight for weight in weights]
    projection.operand = operand_of(parts, [linear.bias for linear in linears])
    return projection


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """The value of `rounded`, the gradient of x."""
    return x + (rounded.double() - x).detach()


def rounded_rows(x: Tensor, activation: Quantizer | None) -> Tensor:
    if activation is None:
        return x
    return straight_through(x, dequantize_activations(*quantize_activations(x.float(), activation), activation))


def wide(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_(True) for tensor in tensors]


def written_out(
    projection: Projection, scheme: Scheme, rows: Tensor, residual: Tensor, masters: list[Tensor]
) -> Tensor:
    """dequant(rows) @ dequant(weight)^T + bias + residual in float64, rounding being identity to gradients."""
    assert projection.operand is not None
    weight = straight_through(torch.cat(masters[:2]), projection.operand.dense())
    bias = torch.cat([torch.zeros(HEIGHTS[0]), masters[2]])
    return rounded_rows(rows, scheme.activation) @ weight.t() + bias + residual


def assert_same(found: Tensor, exact: Tensor) -> None:
    assert exact.abs().max() > 0
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))


@every_scheme
@pytest.mark.parametrize("prologue", ["plain", "norm", "gated"])
@pytest.mark.parametrize(
    ("rounding", "tolerance"), [(None, None), (Rounding(), 1e-3), (Rounding(INT8), 0.05)], ids=["fp32", "int16", "int8"]
)
def test_value_and_gradients_are_those_of_the_straight_through_formula(scheme, prologue, rounding, tolerance):
    projection = projection_of(scheme)
    projection.rounding = rounding
    x = torch.randn(T, 2 * K if prologue == "gated" else K, requires_grad=True)
    gain = torch.randn(K, requires_grad=True)
    residual, grad = torch.randn(T, sum(HEIGHTS), requires_grad=True), torch.randn(T, sum(HEIGHTS))
    wide_x, wide_gain, wide_residual, *wide_masters = wide(x, gain, residual, *projection.masters())
    if prologue == "norm":
        y = projection.of_norm(x, Norm(gain, EPS)) + residual
        rows = wide_x / (wide_x.square().mean(-1, keepdim=True) + EPS).sqrt() * wide_gain
    elif prologue == "gated":
        y = projection.of_gated(x, residual)
        rows = F.silu(wide_x[:, :K]) * wide_x[:, K:]
    else:
        y, rows = projection(x, residual), wide_x
    exact = written_out(projection, scheme, rows, wide_residual, wide_masters)
    assert_same(y.detach(), exact.detach())

    leaves, wide_leaves = [x, residual, *projection.masters()], [wide_x, wide_residual, *wide_masters]
    if prologue == "norm":
        leaves.append(gain)
        wide_leaves.append(wide_gain)
    y.backward(grad)
    for leaf, theirs in zip(leaves, torch.autograd.grad(exact, wide_leaves, grad.double()), strict=True):
        mine = leaf.grad
        assert mine is not None
        if tolerance is None:
            assert_same(mine, theirs)
        else:  # the incoming gradient is rounded to steps of its row's or column's amax / 32512, or / 127
            assert (mine.double() - theirs).norm() <= tolerance * theirs.norm()


@every_scheme
def test_the_forward_has_the_same_bits_with_and_without_gradient(scheme):
    projection, x, gain = projection_of(scheme), torch.randn(T, 2 * K), torch.randn(K)
    half = x[:, :K].contiguous()

    def outputs() -> list[Tensor]:
        return [projection(half), projection.of_norm(half, Norm(gain, EPS)), projection.of_gated(x)]

    trained = outputs()
    with torch.no_grad():
        served = outputs()
    assert all(y.requires_grad for y in trained)
    assert not any(y.requires_grad for y in served)
    assert all(map(torch.equal, trained, served))


@pytest.mark.parametrize("biased", [(False, False), (True, False), (True, True)])
def test_gradients_arrive_at_the_biases_that_exist(biased):
    projection = projection_of(scheme_named("w8a8-int8"), biased)
    projection(torch.randn(T, K)).sum().backward()
    for linear, has_bias in zip(projection.linears, biased, strict=True):
        assert linear.weight.grad is not None and linear.weight.grad.shape == linear.weight.shape
        assert (linear.bias is not None) == has_bias
        if has_bias:
            torch.testing.assert_close(linear.bias.grad, torch.full_like(linear.bias, T))


def test_what_is_multiplied_is_what_is_served_and_not_the_masters():
    projection, x = projection_of(scheme_named("none")), torch.randn(T, K)
    before = projection(x)
    with torch.no_grad():
        for master in projection.masters():
            master.zero_()
    assert torch.equal(projection(x), before)


def test_quantized_inputs_are_kept_for_the_backward_pass_as_codes_alone():
    projection, kept = projection_of(scheme_named("w8a8-int8")), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append((tensor.dtype, tuple(tensor.shape)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        projection(torch.randn(T, K))
    assert set(kept) == {(torch.int8, (T, K)), (torch.float32, (T,))}


def test_a_projection_that_serves_nothing_yet_says_which():
    projection = Projection(["layer.q_proj"], [nn.Linear(4, 4)])
    with pytest.raises(AssertionError, match=r"layer\.q_proj: no weights are served yet"):
        projection(torch.randn(1, 4))
