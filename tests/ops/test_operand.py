"""Published weights in the form that their GEMM multiplies, scheme by scheme."""

from __future__ import annotations

import math

import pytest
import torch

from qarl.errors import RunError
from qarl.ops.kernels import kernels
from qarl.ops.operand import (
    FloatOperand,
    Fp8Operand,
    Int4Operand,
    IntegerOperand,
    Rows,
    is_integer,
    is_weight_only_int4,
    operand_of,
    quantize_weight,
    stack_biases,
)
from qarl.quant.qtensor import dequantize, dequantize_activations, quantize, quantize_activations
from qarl.quant.scheme import SCHEMES, scheme_named

QUANTIZING = [name for name, scheme in SCHEMES.items() if scheme.quantized]
every_quantizing_scheme = pytest.mark.parametrize("name", QUANTIZING)
pytestmark = pytest.mark.usefixtures("each_kernels")

K = 128


def test_integer_schemes_are_those_with_integer_activations_and_a_scale_a_row():
    assert [name for name, scheme in SCHEMES.items() if is_integer(scheme)] == [
        "w8a8-int8",
        "w4a8-int8",
        "w12a12-int12",
    ]


@every_quantizing_scheme
def test_a_weight_is_quantized_to_the_bits_of_its_definition(name):
    weight = torch.randn(70, K) * torch.exp2(torch.randn(70, 1) * 5)
    weight[3] = 0.0
    found, defined = (f(weight, scheme_named(name), "w") for f in (quantize_weight, quantize))
    assert torch.equal(found.codes.float(), defined.codes.float())
    assert found.codes.dtype == defined.codes.dtype
    assert torch.equal(found.scale, defined.scale)
    assert found.scheme is defined.scheme


@every_quantizing_scheme
def test_a_weight_that_is_not_finite_is_an_error_that_names_it(name):
    weight = torch.ones(9, K)
    weight[4, 5] = math.nan
    with pytest.raises(RunError, match=r"layers\.0\.down_proj\.weight: non-finite"):
        quantize_weight(weight, scheme_named(name), "layers.0.down_proj.weight")


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_siblings_become_one_operand_that_multiplies_what_their_codes_stand_for(name, size):
    scheme = scheme_named(name)
    weights = [torch.randn(128, K), size * torch.randn(40, K)]
    parts = [quantize(weight, scheme, "w") if scheme.quantized else weight for weight in weights]
    bias = torch.randn(40)
    operand = operand_of(parts, [None, bias])
    of_floats = Fp8Operand if name in ("fp8", "fp8-block") and kernels().multiplies_fp8 else FloatOperand
    kind = IntegerOperand if is_integer(scheme) else Int4Operand if is_weight_only_int4(scheme) else of_floats
    assert isinstance(operand, kind)

    dense = torch.cat([dequantize(part) if scheme.quantized else part for part in parts])
    assert torch.equal(operand.dense(), dense)
    x, residual = torch.randn(6, K), torch.randn(6, 168)
    rows: Rows = (x, None)
    rounded = x
    if scheme.activation is not None:
        codes, scales = quantize_activations(x, scheme.activation)
        rows = (codes, scales[:, 0]) if operand.quantizes_rows else rows
        rounded = dequantize_activations(codes, scales, scheme.activation)
    assert torch.equal(operand.rows_as_float(rows), rounded)
    steps = 7.0 if scheme.weight is None else min(scheme.weight.format.largest, 7.0)
    assert (dense[128:] - weights[1]).abs().max() <= 2.2 / steps * size  # of its own scale, not of its large sibling's
    exact = rounded.double() @ dense.double().t() + torch.cat([torch.zeros(128), bias]) + residual
    torch.testing.assert_close(operand.product(rows, residual).double(), exact, rtol=1e-5, atol=1e-4)
    exact = exact - residual
    torch.testing.assert_close(operand.product(rows, None).double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_run_of_output_columns_is_multiplied_as_in_the_whole(name):
    scheme, weight, bias, x = scheme_named(name), torch.randn(200, K), torch.randn(200), torch.randn(6, K)
    quantized = quantize(weight, scheme, "w") if scheme.quantized else None
    operand = operand_of([weight if quantized is None else quantized], [bias])
    assert quantized is None or torch.equal(operand.dense(), dequantize(quantized))
    rows: Rows = (x, None)
    if operand.quantizes_rows:
        codes, scales = quantize_activations(x, scheme.activation)
        rows = (codes, scales[:, 0])
    whole = operand.product(rows, None)
    for some in (range(0, 64), range(64, 192), range(128, 200), range(200)):
        part = operand.outputs(some)
        assert part.height == len(some)
        assert torch.equal(part.dense(), operand.dense()[some.start : some.stop])
        found = part.product(rows, None)
        if kernels().exact_matmul or is_integer(scheme):
            assert torch.equal(found, whole[:, some.start : some.stop])
        else:
            torch.testing.assert_close(found, whole[:, some.start : some.stop])


def test_biases_of_siblings_are_stacked_with_zeros_for_those_without():
    bias = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    stacked = stack_biases([3, 2, 1], [None, bias, None])
    assert stacked is not None
    assert stacked.tolist() == [0.0, 0.0, 0.0, 1.0, 2.0, 0.0]
    assert not stacked.requires_grad
    assert stack_biases([3, 2], [None, None]) is None


def test_a_float_operand_is_a_copy_that_later_updates_do_not_change():
    weight = torch.randn(5, 16)
    operand, before = operand_of([weight], [None]), weight.clone()
    weight.zero_()
    assert torch.equal(operand.dense(), before)


def test_siblings_of_two_schemes_are_a_bug():
    weight = torch.randn(8, K)
    parts = [quantize(weight, scheme_named(name), "w") for name in ("w8a8-int8", "w4a8-int8")]
    with pytest.raises(AssertionError):
        operand_of(parts, [None, None])
