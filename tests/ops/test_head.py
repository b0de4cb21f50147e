"""Log-probabilities of given tokens from hidden states: value, gradient, and that chunks change nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from qarl.ops.embedding import embedding as embed
from qarl.ops.head import COLUMNS, LARGEST_BLOCK, Head, logits, token_logprobs, vocabulary_block
from qarl.ops.kernels import kernels
from qarl.ops.linear import Norm
from qarl.ops.operand import operand_of, quantize_weight
from qarl.ops.reference import ReferenceKernels
from qarl.quant.qtensor import dequantize_activations, quantize_activations
from qarl.quant.scheme import Scheme, scheme_named

T, D, V, EPS = 13, 128, 101, 1e-3

every_head = pytest.mark.parametrize("scheme", ["none", "w8a8-int8", "w12a12-int12", "w4a16", "fp8"])


def head_of(scheme: Scheme, weight: Tensor, rows: int = V) -> Head:
    """Serves the first `rows` rows of a master weight."""
    served = weight.detach()[:rows]
    part = quantize_weight(served, scheme, "lm_head") if scheme.quantized else served
    gain = nn.Parameter(1 + torch.randn(D) / 4)
    return Head(operand_of([part], [None]), Norm(gain, EPS), weight)


def inputs(rows: int = V) -> tuple[Tensor, Tensor, Tensor]:
    weight = nn.Parameter(torch.randn(V, D) * 0.3)
    return torch.randn(T, D, requires_grad=True), torch.randint(rows, (T,)), weight


def written_out(
    head: Head, scheme: Scheme, hidden: Tensor, gain: Tensor, weight: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The same in float64 from log_softmax of all logits, rounding being identity to gradients."""
    rows = hidden / (hidden.square().mean(-1, keepdim=True) + EPS).sqrt() * gain
    if scheme.activation is not None:
        normed = kernels().rms_norm(
            hidden.detach().float(), gain.detach().float(), EPS
        )  # the edge between two codes is fp32's
        rounded = dequantize_activations(*quantize_activations(normed, scheme.activation), scheme.activation)
        rows = rows + (rounded - rows).detach()
    dense = head.operand.dense()
    weight = weight[: len(dense)]
    log_p = (rows @ (weight + (dense - weight).detach()).t() / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def wide(*tensors: Tensor) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_(True) for tensor in tensors]


def gradients(loss: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Of leaves whose gradients are theirs alone from here on."""
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    found = [leaf.grad for leaf in leaves]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def assert_same(found: Tensor, exact: Tensor) -> None:
    assert exact.abs().max() > 0
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))


@every_head
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows", [V, 90])
@pytest.mark.parametrize("weight_of_entropy", [0.0, 0.5])
def test_value_and_gradients_are_those_of_log_softmax(
    each_kernels: ReferenceKernels, scheme, temperature, rows, weight_of_entropy
):
    hidden, targets, weight = inputs(rows)
    head = head_of(scheme_named(scheme), weight, rows)
    wide_leaves = x, gain, master = wide(hidden, head.norm.gain, weight)
    exact, exact_entropy = written_out(head, scheme_named(scheme), x, gain, master, targets, temperature)
    found, entropy = token_logprobs(head, hidden, targets, temperature, 5, weight_of_entropy > 0)
    assert_same(found.detach(), exact.detach())
    assert_same(entropy.detach(), exact_entropy.detach())

    grad = torch.randn(T)
    loss = (found * grad).sum() + weight_of_entropy * entropy.square().sum()
    exact_loss = (exact * grad).sum() + weight_of_entropy * exact_entropy.square().sum()
    mine = gradients(loss, (hidden, head.norm.gain, weight))
    for gradient, exact_gradient in zip(mine, torch.autograd.grad(exact_loss, wide_leaves), strict=True):
        assert_same(gradient, exact_gradient)
    assert not mine[2][rows:].any(), "rows of the master that are not served have no gradient"


@every_head
def test_the_size_of_chunks_changes_no_bit_of_the_values_and_gradients_only_by_rounding(scheme):
    if not kernels().exact_matmul:
        pytest.skip("the reference's float products depend on the batch")
    hidden, targets, weight = inputs()
    head = head_of(scheme_named(scheme), weight)
    leaves = (hidden, head.norm.gain, weight)
    whole = token_logprobs(head, hidden, targets, 0.7, 1000, True)
    whole_gradients = gradients(whole[0].sum() + whole[1].sum(), leaves)
    for chunk in (1, 4, 12, 13):
        parts = token_logprobs(head, hidden, targets, 0.7, chunk, True)
        assert all(map(torch.equal, parts, whole))
        found = gradients(parts[0].sum() + parts[1].sum(), leaves)
        for gradient, whole_gradient in zip(found, whole_gradients, strict=True):
            torch.testing.assert_close(gradient, whole_gradient, rtol=1e-4, atol=1e-5)


def test_blocks_of_the_vocabulary_hold_no_more_logits_than_a_chunk_of_rows_does():
    assert vocabulary_block(rows=10, vocabulary=49152, chunk=256) == LARGEST_BLOCK
    for rows in (4000, 10000, 65536):
        width = vocabulary_block(rows, 49152, 256)
        assert width % COLUMNS == 0
        assert rows * width <= 256 * 49152 < rows * (width + COLUMNS)
    assert vocabulary_block(rows=65536, vocabulary=101, chunk=1) == COLUMNS
    assert vocabulary_block(rows=0, vocabulary=101, chunk=1) == COLUMNS


def test_entropies_have_no_gradient_unless_asked_for():
    hidden, targets, weight = inputs()
    head = head_of(scheme_named("none"), weight)
    logprobs, entropy = token_logprobs(head, hidden, targets, 1.0, 4)
    assert logprobs.requires_grad
    assert not entropy.requires_grad
    asked = token_logprobs(head, hidden, targets, 1.0, 4, True)[1]
    assert torch.equal(asked, entropy)
    (gradient,) = torch.autograd.grad(asked.sum(), hidden)
    assert gradient.abs().max() > 0


def test_a_tied_weight_collects_the_gradients_of_embedding_and_head():
    embedding = nn.Embedding(V, D)
    ids, targets = torch.tensor([3, 5, 3, 9]), torch.tensor([5, 3, 9, 100])
    head = head_of(scheme_named("none"), embedding.weight)
    found = token_logprobs(head, embed(ids, embedding.weight), targets, 1.0, 2)[0]
    (gradient,) = gradients(found.sum(), [embedding.weight])
    weight, gain = wide(embedding.weight, head.norm.gain)
    exact, _ = written_out(head, scheme_named("none"), weight[ids], gain, weight, targets, 1.0)
    assert_same(gradient, torch.autograd.grad(exact.sum(), weight)[0])


def test_sampling_from_logits_reports_what_scoring_the_hidden_states_gives():
    hidden, _, weight = inputs()
    head = head_of(scheme_named("none"), weight)
    tokens, logprobs = kernels().sample(logits(head, hidden), torch.rand(T), 1 / 0.7)
    if not kernels().exact_matmul:
        pytest.skip("the reference's float products depend on the batch")
    assert torch.equal(token_logprobs(head, hidden, tokens, 0.7, 5)[0], logprobs)


def test_logits_are_without_gradient_and_as_wide_as_what_is_served():
    hidden, _, weight = inputs()
    head = head_of(scheme_named("none"), weight, rows=90)
    found = logits(head, hidden)
    assert found.shape == (T, 90)
    assert not found.requires_grad
    normed = hidden / (hidden.square().mean(-1, keepdim=True) + EPS).sqrt() * head.norm.gain
    assert_same(found, (normed.double() @ weight[:90].double().t()).detach())
