"""The definitions of the operations, on numbers worked out by hand and against torch's own functions in float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qarl.errors import RunError
from qarl.ops.reference import ReferenceKernels, Spans, rotate, visible_rows
from qarl.quant.formats import INT4

REFERENCE = ReferenceKernels()


def one_query(spans: list[tuple[int, int]], visible: int) -> Spans:
    flat = torch.tensor(spans)
    cuts = torch.tensor([0, len(spans)])
    return Spans(
        torch.tensor([0]), torch.tensor([visible]), cuts, flat[:, 0], flat[:, 1], torch.tensor([0, 1]), visible
    )


def test_rms_norm_by_hand():
    # Mean square of (3, 4, 0, 0) is 25 / 4, its root 2.5.
    y = REFERENCE.rms_norm(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.tensor([1.0, 2.0, 1.0, 1.0]), 0.0)
    torch.testing.assert_close(y, torch.tensor([[1.2, 3.2, 0.0, 0.0]]))


def test_rms_norm_of_zeros_is_zero():
    assert REFERENCE.rms_norm(torch.zeros(2, 3), torch.ones(3), 1e-6).tolist() == [[0.0] * 3] * 2


def test_gated_takes_the_gate_first():
    # silu(ln 3) = ln 3 / (1 + 1 / 3).
    y = REFERENCE.gated(torch.tensor([[math.log(3), 0.0, 2.0, 5.0]]))
    torch.testing.assert_close(y, torch.tensor([[math.log(3) * 0.75 * 2.0, 0.0]]))


def test_quantize_rows_by_hand():
    codes, scales = REFERENCE.quantize_rows(torch.tensor([[254.0, -1.0, 3.0], [0.0, 0.0, 0.0]]))
    assert codes.tolist() == [[127, 0, 2], [0, 0, 0]]  # -0.5 and 1.5 are ties: to even
    assert scales.tolist() == [2.0, 1.0]
    codes, scales = REFERENCE.quantize_rows(torch.tensor([[7.0, 3.4, -7.0]]), INT4)
    assert codes.tolist() == [[7, 3, -7]]
    assert scales.tolist() == [1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_are_an_error(bad):
    x = torch.ones(3, 4)
    x[2, 1] = bad
    for operation in (
        lambda: REFERENCE.quantize_rows(x),
        lambda: REFERENCE.rms_norm_quantize(x, torch.ones(4), 1e-6),
        lambda: REFERENCE.gated_quantize(x),
    ):
        with pytest.raises(RunError, match="non-finite"):
            operation()


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16])
def test_an_integer_product_by_hand(dtype):
    codes = torch.tensor([[1, -2], [3, 4]], dtype=dtype)
    weight = REFERENCE.pack_codes(torch.tensor([[10, 1], [0, 5]], dtype=dtype))
    rows, columns = torch.tensor([0.5, 1.0]), torch.tensor([2.0, 1.0])
    bias, residual = torch.tensor([100.0, 200.0]), torch.tensor([[0.25, 0.0], [0.0, -0.5]])
    # Sums [[8, -10], [34, 20]]; scales [[1, 0.5], [2, 1]].
    y = REFERENCE.integer_matmul(codes, rows, weight, columns, bias, residual)
    assert y.tolist() == [[108.25, 195.0], [168.0, 219.5]]
    assert REFERENCE.integer_matmul(codes, rows, weight, columns, None, None).tolist() == [[8.0, -5.0], [68.0, 20.0]]


def test_a_float_product_with_bias_and_residual_by_hand():
    x, packed = torch.tensor([[1.0, -2.0]]), REFERENCE.pack(torch.tensor([[10.0, 1.0], [0.0, 5.0]]))
    assert REFERENCE.matmul(x, packed, 2, None, None).tolist() == [[8.0, -10.0]]
    bias, residual = torch.tensor([100.0, 200.0]), torch.tensor([[0.25, 0.0]])
    assert REFERENCE.matmul(x, packed, 2, bias, residual).tolist() == [[108.25, 190.0]]


def test_a_4_bit_product_by_hand():
    codes, scales = torch.tensor([[1, -2, 3, 0]], dtype=torch.int8), torch.tensor([[0.5, 2.0]])
    weight = REFERENCE.pack_int4(codes, scales)
    assert REFERENCE.dense_int4(weight).tolist() == [[0.5, -1.0, 6.0, 0.0]]
    y = REFERENCE.matmul_int4(torch.tensor([[2.0, 1.0, 1.0, 9.0]]), weight, torch.tensor([10.0]), torch.tensor([[0.5]]))
    assert y.tolist() == [[16.5]]


def test_rotation_turns_element_i_against_its_partner_half_a_head_away():
    quarter = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])  # cosines and sines: a quarter turn, no turn
    assert rotate(torch.tensor([1.0, 2.0, 3.0, 4.0]), *quarter).tolist() == [-3.0, 2.0, 1.0, 4.0]


def test_scores_depend_on_distance_alone():
    angles = torch.arange(50)[:, None] * torch.tensor([1.0, 0.1])
    q, k = torch.randn(4), torch.randn(4)

    def score(at: int, other: int) -> float:
        turned = (rotate(x, angles[p].cos(), angles[p].sin()) for x, p in ((q, at), (k, other)))
        return float(torch.dot(*turned))

    assert score(7, 3) == pytest.approx(score(44, 40), abs=1e-5)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


def test_split_rotate_fills_the_slots_and_norms_each_head():
    keys, values = torch.zeros(3, 1, 2), torch.zeros(3, 1, 2)
    qkv = torch.tensor([[3.0, 4.0, 0.0, 5.0, 7.0, 8.0]])  # one query head, one key head, one value head
    cosines, sines = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.0], [1.0]])  # position 1: a quarter turn
    gains = (torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0]))
    q = REFERENCE.split_rotate(qkv, torch.tensor([1]), torch.tensor([2]), cosines, sines, gains, 0.0, 1, keys, values)
    root = math.sqrt(12.5)  # both heads have mean square 12.5
    torch.testing.assert_close(q, torch.tensor([[[-4.0 / root, 3.0 / root]]]))
    torch.testing.assert_close(keys[2], torch.tensor([[-10.0 / root, 0.0]]))
    assert values[2].tolist() == [[7.0, 8.0]]
    assert not keys[:2].any() and not values[:2].any()


def test_visible_rows_follow_the_spans_in_order_and_stop():
    assert visible_rows(one_query([(10, 3), (2, 2), (30, 5)], visible=7), 0).tolist() == [10, 11, 12, 2, 3, 30, 31]
    assert visible_rows(one_query([(10, 3), (2, 2)], visible=2), 0).tolist() == [10, 11]


def test_attention_by_hand():
    # Scores 0 and ln 3: weights 1/4 and 3/4.
    keys = torch.tensor([[[0.0]], [[math.log(3)]], [[9.0]]])
    values = torch.tensor([[[4.0]], [[8.0]], [[1e9]]])
    out, lse = REFERENCE.attention(torch.ones(1, 1, 1), keys, values, one_query([(0, 3)], visible=2), 1.0)
    torch.testing.assert_close(out, torch.tensor([[[7.0]]]))
    torch.testing.assert_close(lse, torch.tensor([[math.log(4.0)]]))


def test_attention_is_torchs_causal_attention_with_grouped_heads():
    q, keys, values = torch.randn(9, 6, 8), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    positions = torch.arange(9)
    cuts = torch.tensor([0, 1])
    spans = Spans(positions * 0, positions + 1, cuts, torch.tensor([0]), torch.tensor([9]), torch.tensor([0, 9]), 9)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (q, keys, values)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(REFERENCE.attention(q, keys, values, spans, 8**-0.5)[0], expected[0].transpose(0, 1))


def test_log_probabilities_and_entropies_by_hand():
    # Weights 1, 3, 4 at temperature 1.
    logits = torch.tensor([[0.0, math.log(3), math.log(4)]])
    scores = REFERENCE.token_logprobs(logits, torch.tensor([1]), 1.0)
    assert scores.logprobs.item() == pytest.approx(math.log(3 / 8))
    assert scores.entropies.item() == pytest.approx(
        -(math.log(1 / 8) / 8 + math.log(3 / 8) * 3 / 8 + math.log(1 / 2) / 2)
    )
    assert scores.shifts.item() == pytest.approx(math.log(4))
    assert scores.sums.item() == pytest.approx(2.0)
    # Temperature 1 / 2 squares the weights: 1, 9, 16.
    squared = REFERENCE.token_logprobs(logits, torch.tensor([1]), 2.0)
    assert squared.logprobs.item() == pytest.approx(math.log(9 / 26))
    # Of the log-probability (onehot - p) / temperature, of the entropy -p (log p + entropy) / temperature.
    nothing, one = torch.zeros(1), torch.ones(1)
    of_logprob = REFERENCE.logits_gradient_(logits.clone(), torch.tensor([1]), squared, one, None, 2.0)
    torch.testing.assert_close(of_logprob, torch.tensor([[-2 / 26, 2 - 18 / 26, -32 / 26]]))
    of_entropy = REFERENCE.logits_gradient_(logits.clone(), torch.tensor([1]), squared, nothing, one, 2.0)
    p = torch.tensor([[1 / 26, 9 / 26, 16 / 26]])
    torch.testing.assert_close(of_entropy, -2 * p * (p.log() - (p * p.log()).sum()))


def test_sums_of_chunks_are_those_of_whole_numbers_without_a_sign(each_kernels: ReferenceKernels):
    generator = torch.Generator().manual_seed(0)
    words, multipliers = (torch.randint(-(2**63), 2**63 - 1, shape, generator=generator) for shape in ((3, 50), (50,)))
    rows = [[word % 2**64 for word in row] for row in words.tolist()]
    factors = [factor % 2**64 for factor in multipliers.tolist()]
    expected = [
        [sum((word >> shift) * factor for word, factor in zip(row, factors, strict=True)) % 2**64 for row in rows]
        for shift in (0, 32)
    ]
    found = each_kernels.chunk_sums(words, multipliers).tolist()
    assert [[total % 2**64 for total in sums] for sums in found] == expected


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 1), (0.24, 1), (0.26, 2), (0.74, 2), (0.76, 4), (1 - 2.0**-24, 4)]
)
def test_sampling_inverts_the_cumulative_distribution_and_skips_weight_zero(uniform, token):
    # Weights 0, 1, 2, 0, 1, 0: the cumulative shares are 1/4 and 3/4.
    logits = torch.tensor([[-math.inf, 0.0, math.log(2), -math.inf, 0.0, -math.inf]])
    tokens, logprobs = REFERENCE.sample(logits, torch.tensor([uniform]), 1.0)
    assert tokens.tolist() == [token]
    assert logprobs.item() == pytest.approx(math.log(0.5 if token == 2 else 0.25))


# ---------------------------------------------------------------------------------------------- gradients

EPS = 1e-3
"""Large enough that leaving it out would show."""


def wide(*tensors: Tensor) -> list[Tensor]:
    return [tensor.double().requires_grad_(True) for tensor in tensors]


@pytest.mark.parametrize("leading", [(5,), (5, 3), (70, 2)])
def test_rms_norm_backward_is_autograds(each_kernels: ReferenceKernels, leading):
    x, gain, grad = torch.randn(*leading, 17) * 0.1, torch.randn(17), torch.randn(*leading, 17)
    wide_x, wide_gain = wide(x, gain)
    y = wide_x / (wide_x.square().mean(-1, keepdim=True) + EPS).sqrt() * wide_gain
    expected = torch.autograd.grad(y, (wide_x, wide_gain), grad.double())
    for found, exact in zip(each_kernels.rms_norm_backward(grad, x, gain, EPS), expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5)


def test_gated_backward_is_autograds(each_kernels: ReferenceKernels):
    gate_up, grad = torch.randn(6, 22) * 4, torch.randn(6, 11)
    (wide_gate_up,) = wide(gate_up)
    gate, up = wide_gate_up.chunk(2, -1)
    (expected,) = torch.autograd.grad(F.silu(gate) * up, wide_gate_up, grad.double())
    torch.testing.assert_close(each_kernels.gated_backward(grad, gate_up).double(), expected, rtol=1e-5, atol=1e-6)


def test_gates_of_any_size_have_finite_gradients(each_kernels: ReferenceKernels):
    gate_up = torch.tensor([[-300.0, 300.0, 0.0, 2.0, 2.0, 2.0]])
    grad = each_kernels.gated_backward(torch.ones(1, 3), gate_up)
    # silu' is 0, 1 and 1/2 there; silu itself 0, 300 and 0.
    torch.testing.assert_close(grad, torch.tensor([[0.0, 2.0, 1.0, 0.0, 300.0, 0.0]]))


@pytest.mark.parametrize("size", [1, 7, 16, 1000, 1025])
@pytest.mark.parametrize("temperature", [0.5, 3.0])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_the_gradient_of_logits_is_autograds(each_kernels: ReferenceKernels, size, temperature, with_entropy):
    logits, targets = torch.randn(11, size) * 4, torch.randint(size, (11,))
    grad, grad_entropy = torch.randn(11), torch.randn(11) if with_entropy else torch.zeros(11)
    (wide_logits,) = wide(logits)
    log_p = (wide_logits / temperature).log_softmax(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    results = (log_p.gather(1, targets[:, None])[:, 0], entropies)
    (expected,) = torch.autograd.grad(results, wide_logits, (grad.double(), grad_entropy.double()))
    scores = each_kernels.token_logprobs(logits, targets, 1 / temperature)
    cut = size // 2  # in two blocks of the vocabulary, the target in one of them
    for first, stop in ((0, cut), (cut, size)):
        block, of_entropy = logits[:, first:stop].contiguous(), grad_entropy if with_entropy else None
        found = each_kernels.logits_gradient_(block, targets - first, scores, grad, of_entropy, 1 / temperature)
        torch.testing.assert_close(found.double(), expected[:, first:stop], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 2), (9, 3, 64), (4, 1, 10)])
def test_split_rotate_backward_is_autograds(each_kernels: ReferenceKernels, heads, kv_heads, dim):
    rows, angles = 130, torch.randn(200, dim // 2)
    positions = torch.randint(200, (rows,))
    (qkv,) = wide(torch.randn(rows, (heads + 2 * kv_heads) * dim))
    q, k, v = qkv.view(rows, -1, dim).split([heads, kv_heads, kv_heads], 1)
    cosine, sine = angles.cos().double()[positions][:, None], angles.sin().double()[positions][:, None]
    results = (*(torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1) for a, b in halves(q, k)), v)
    grads = (torch.randn(rows, heads, dim), torch.randn(rows, kv_heads, dim), torch.randn(rows, kv_heads, dim))
    (expected,) = torch.autograd.grad(results, qkv, [grad.double() for grad in grads])
    found = each_kernels.split_rotate_backward(*grads, positions, angles.cos(), angles.sin())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def halves(*tensors: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]) for x in tensors]
