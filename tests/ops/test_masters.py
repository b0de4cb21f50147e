"""One process holds every master: gradients go to `.grad`, values are the masters' own memory."""

from __future__ import annotations

import torch
from torch import nn

from qarl.ops.gradient import gradient_of
from qarl.ops.masters import WHOLE
from qarl.ops.operand import quantize_weight
from qarl.quant.scheme import SCHEMES


def test_shares_are_added_to_grad_in_place():
    masters = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(1, 2))]
    for _ in range(2):
        with WHOLE.gradients(*masters) as buffers:
            for buffer in buffers:
                buffer += 1.5
    assert [gradient_of(master).tolist() for master in masters] == [[[3.0, 3.0]] * 2, [[3.0, 3.0]]]
    WHOLE.add_rows(masters[0], torch.tensor([1, 1]), torch.ones(2, 2))
    assert gradient_of(masters[0]).tolist() == [[3.0, 3.0], [5.0, 5.0]]


def test_the_first_rows_are_quantized_and_values_are_not_copied():
    master = nn.Parameter(torch.randn(4, 8))
    found = WHOLE.quantize(master, 3, SCHEMES["w8a8-int8"], "w")
    exact = quantize_weight(master.detach()[:3], SCHEMES["w8a8-int8"], "w")
    assert torch.equal(found.codes, exact.codes) and torch.equal(found.scale, exact.scale)
    for values in (WHOLE.whole(master), WHOLE.values(master)):
        assert values is not None
        assert values.data_ptr() == master.data_ptr() and not values.requires_grad
