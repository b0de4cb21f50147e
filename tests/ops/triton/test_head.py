"""Sampling at the edges of its distribution."""

from __future__ import annotations

import math

import pytest
import torch

from qarl.ops.reference import ReferenceKernels

UP_TO = 1.0 - 2.0**-24
"""The largest uniform number that is drawn."""


def rows_of(n: int, **logits: float) -> torch.Tensor:
    """Of `n` tokens only these can be drawn: `t7=0.5` is token 7 with logit 0.5."""
    row = torch.full((1, n), -math.inf)
    for token, logit in logits.items():
        row[0, int(token[1:])] = logit
    return row


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 5), (0.499, 5), (0.5, 1500), (0.75, 2100), (UP_TO, 2100)])
def test_the_token_is_that_whose_share_holds_the_uniform_number(triton_kernels: ReferenceKernels, uniform, token):
    """5 and 1500 and 2100, in three blocks, with shares 1/2, 1/4 and 1/4."""
    logits = rows_of(2200, t5=math.log(2.0), t1500=0.0, t2100=0.0)
    tokens, logprobs = triton_kernels.sample(logits, torch.tensor([uniform]), 1.0)
    assert tokens.tolist() == [token]
    assert logprobs.item() == pytest.approx(math.log(0.5 if token == 5 else 0.25), abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.3, UP_TO])
def test_a_token_of_weight_zero_is_never_drawn(triton_kernels: ReferenceKernels, uniform):
    for logits in (rows_of(40, t0=3.0), rows_of(40, t39=3.0), rows_of(1100, t1024=3.0)):
        (token,), (logprob,) = triton_kernels.sample(logits, torch.tensor([uniform]), 0.7)
        assert logits[0, token] == 3.0 and logprob == 0.0


def test_logits_that_are_not_numbers_show_in_the_log_probability(triton_kernels: ReferenceKernels):
    logits = torch.randn(2, 50)
    logits[1, 3] = math.nan
    tokens, logprobs = triton_kernels.sample(logits, torch.tensor([0.5, 0.5]), 1.0)
    assert 0 <= tokens[1] < 50
    assert logprobs[0].isfinite() and logprobs[1].isnan()


def test_draws_are_those_of_the_definition(triton_kernels: ReferenceKernels):
    logits, uniforms = torch.randn(40, 300) * 2, (torch.arange(40) + 0.5) / 40
    found, defined = (k.sample(logits, uniforms, 1 / 0.7) for k in (triton_kernels, ReferenceKernels()))
    assert torch.equal(found[0], defined[0])
    torch.testing.assert_close(found[1], defined[1])
