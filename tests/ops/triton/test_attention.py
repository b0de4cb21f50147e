"""Attention over spans: the bits of a query do not depend on where its keys lie, nor on who is in its tile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qarl.ops.reference import KVCodes, ReferenceKernels, Spans

HEADS, KV_HEADS, DIM, LENGTH = 6, 2, 24, 70
"""Three query heads a key/value head, and keys of three blocks."""


def spans_over(lengths: list[int], starts: list[int], visible: list[int]) -> Spans:
    """Queries of one sequence, whose keys lie in runs of these lengths at these rows."""
    return Spans(
        sequences=torch.zeros(len(visible), dtype=torch.int64),
        visible=torch.tensor(visible),
        pointers=torch.tensor([0, len(lengths)]),
        starts=torch.tensor(starts),
        lengths=torch.tensor(lengths),
        families=torch.tensor([0, len(visible)]),
        longest=max(visible),
    )


def stored(x_LGC: Tensor, lengths: list[int], starts: list[int]) -> Tensor:
    """A store with the rows of `x` in these runs, a head's rows being neighbours, as an engine has them."""
    store = torch.full((KV_HEADS, 200, DIM), 9.0).transpose(0, 1)
    for run, start in zip(x_LGC.split(lengths), starts, strict=True):
        store[start : start + len(run)] = run
    return store


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = (
    normal(LENGTH, HEADS, DIM, seed=1),
    normal(LENGTH, KV_HEADS, DIM, seed=2),
    normal(LENGTH, KV_HEADS, DIM, seed=3),
)
LAYOUTS = [([70], [0]), ([33, 37], [100, 5]), ([1, 31, 32, 0, 6], [150, 20, 60, 7, 110])]


@pytest.mark.parametrize(("lengths", "starts"), LAYOUTS)
def test_keys_may_lie_anywhere_and_queries_come_alone_or_together(triton_kernels: ReferenceKernels, lengths, starts):
    whole, whole_lse = triton_kernels.attention(Q, K, V, spans_over([70], [0], list(range(1, 71))), 0.2)
    keys, values = stored(K, lengths, starts), stored(V, lengths, starts)
    for t in (0, 31, 32, 69):  # as in a decode step, where a query is alone in its tile
        spans = spans_over(lengths, starts, [t + 1])
        out, lse = triton_kernels.attention(Q[t : t + 1], keys, values, spans, 0.2)
        assert torch.equal(out[0], whole[t]) and torch.equal(lse[0], whole_lse[t])
    chunk = triton_kernels.attention(Q[40:], keys, values, spans_over(lengths, starts, list(range(41, 71))), 0.2)[0]
    assert torch.equal(chunk, whole[40:])


def test_it_is_softmax_attention(triton_kernels: ReferenceKernels):
    spans = spans_over([70], [0], list(range(1, 71)))
    for found, defined in zip(
        triton_kernels.attention(Q, K, V, spans, 0.2), ReferenceKernels().attention(Q, K, V, spans, 0.2), strict=True
    ):
        torch.testing.assert_close(found, defined, rtol=1e-5, atol=1e-5)


def test_an_int8_store_is_read_as_what_its_codes_stand_for(triton_kernels: ReferenceKernels):
    stores = []
    for x in (K, V):
        codes, scales = triton_kernels.quantize_rows(x.flatten(0, 1))
        stores.append(KVCodes(codes.view(x.shape), scales.view(x.shape[:2])))
    spans = spans_over([70], [0], list(range(1, 71)))
    keys, values = stores
    of_codes = triton_kernels.attention(Q, keys, values, spans, 0.2)
    of_values = triton_kernels.attention(Q, keys.as_float(), values.as_float(), spans, 0.2)
    assert all(map(torch.equal, of_codes, of_values))


def test_the_gradient_is_that_of_the_definition(triton_kernels: ReferenceKernels):
    """A prompt of 33 tokens and two answers to it, packed as a learner does."""
    sequences = torch.tensor([0] * 33 + [1] * 20 + [2] * 17)
    visible = torch.cat([torch.arange(1, 34), torch.arange(34, 54), torch.arange(34, 51)])
    tables = ([0, 1, 3, 5], [0, 0, 33, 0, 53], [33, 33, 20, 33, 17])
    pointers, starts, lengths = map(torch.tensor, tables)
    spans = Spans(sequences, visible, pointers, starts, lengths, torch.tensor([0, 70]), 53)
    grad = normal(LENGTH, HEADS, DIM, seed=4)
    out, lse = ReferenceKernels().attention(Q, K, V, spans, 0.2)
    found, defined = (
        k.attention_backward(grad, Q, K, V, out, lse, spans, 0.2) for k in (triton_kernels, ReferenceKernels())
    )
    for mine, theirs in zip(found, defined, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    again = triton_kernels.attention_backward(grad, Q, K, V, out, lse, spans, 0.2)
    assert all(map(torch.equal, found, again))
