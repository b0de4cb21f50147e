"""Mismatch weights by hand."""

from __future__ import annotations

import math

import pytest
import torch
from pydantic import ValidationError

from qarl.objectives.corrections import CORRECTIONS, Ais, IcePop, Mis, NoCorrection, SequenceTis, TokenTis

LOG2, LOG8 = math.log(2.0), math.log(8.0)


@pytest.fixture
def batch(inputs):
    """Token ratios old / engine: 1/2 and 8, product 4, geometric mean 2; then 1 and a masked 1000; then nothing."""
    return inputs(
        [[0.0, 0.0]] * 3,
        [1.0] * 3,
        engine=[[LOG2, -LOG8], [0.0, -math.log(1000.0)], [50.0, -50.0]],
        mask=[[True, True], [True, False], [False, False]],
    )


def values(metrics, name):
    return metrics[f"correction/{name}"].value()


def test_no_correction_is_weight_one(batch):
    correction = NoCorrection()(batch)
    assert correction.weights.tolist() == [[1.0]] * 3
    assert correction.metrics == {}


def test_token_tis_truncates_each_token(batch):
    correction = TokenTis(cap=2.0)(batch)
    torch.testing.assert_close(correction.weights[:2], torch.tensor([[0.5, 2.0], [1.0, 1.0]]).double())
    assert values(correction.metrics, "truncated") == pytest.approx(1 / 3)
    assert values(correction.metrics, "weight_mean") == pytest.approx(3.5 / 3)
    assert values(correction.metrics, "weight_max") == pytest.approx(2.0)


def test_sequence_tis_weighs_by_the_geometric_mean_or_the_product(batch):
    geometric = SequenceTis(cap=3.0)(batch)
    product = SequenceTis(cap=3.0, ratio="product")(batch)
    torch.testing.assert_close(geometric.weights[:, 0], torch.tensor([2.0, 1.0, 1.0]).double())
    torch.testing.assert_close(product.weights[:, 0], torch.tensor([3.0, 1.0, 1.0]).double())
    assert values(geometric.metrics, "truncated") == 0.0
    assert values(product.metrics, "truncated") == 0.5  # of two sequences with trained tokens


def test_icepop_keeps_the_ratio_inside_the_band_and_zero_outside(batch):
    correction = IcePop(low=0.4, high=5.0)(batch)
    torch.testing.assert_close(correction.weights[:2], torch.tensor([[0.5, 0.0], [1.0, 1.0]]).double())
    assert values(correction.metrics, "dropped") == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("correction", "kept"),
    [
        (Mis(), [0.0, 1.0, 1.0]),
        (Mis(low=0.5, high=2.5), [1.0, 1.0, 1.0]),
        (Mis(low=1.5, high=2.5), [1.0, 0.0, 0.0]),
        (Mis(ratio="product"), [0.0, 1.0, 1.0]),
        (Mis(ratio="product", high=4.5), [1.0, 1.0, 1.0]),
    ],
)
def test_mis_drops_sequences_outside_the_band(batch, correction, kept):
    assert correction(batch).weights[:, 0].tolist() == kept


def test_mis_reports_the_fraction_of_sequences_dropped(batch):
    assert values(Mis()(batch).metrics, "dropped") == 0.5


def test_ais_interpolates_between_no_correction_and_token_tis(batch):
    # First sequence: ESS / T = 8.5^2 / 64.25 / 2 = 0.5622568; mean |log w| = (log 2 + log 8) / 2 = 1.386.
    half_wary = Ais(cap=2.0, divergence_scale=100.0)(batch)
    strength = 1.0 - 8.5**2 / 64.25 / 2
    expected = torch.tensor([1 - strength * 0.5, 1 + strength * 1.0]).double()
    torch.testing.assert_close(half_wary.weights[0], expected)
    assert half_wary.weights[1].tolist() == [1.0, 1.0]
    assert values(half_wary.metrics, "lambda") == pytest.approx(strength / 2)
    full = Ais(cap=2.0, divergence_scale=0.1)(batch)
    torch.testing.assert_close(full.weights[:2], TokenTis(cap=2.0)(batch).weights[:2])


def test_ais_does_not_count_padding_as_reliable_tokens(inputs):
    row, mask = [LOG2, -LOG8], [True, True]
    narrow = inputs([[0.0] * 2], [1.0], engine=[row], mask=[mask])
    wide = inputs([[0.0] * 4], [1.0], engine=[[*row, 0.0, 0.0]], mask=[[*mask, False, False]])
    ais = Ais(divergence_scale=100.0)
    torch.testing.assert_close(ais(wide).weights[:, :2], ais(narrow).weights)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_exact_agreement_gives_weight_exactly_one(inputs, name):
    batch = inputs([[0.3, -0.7]], [1.0], old=[[-0.1, -2.3]])
    assert (CORRECTIONS[name]()(batch).weights == 1.0).all()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_carry_no_gradient(inputs, name):
    batch = inputs([[0.3, -0.7]], [1.0], engine=[[-0.1, -2.3]])
    batch.old_BT.requires_grad_(True)
    assert not CORRECTIONS[name]()(batch).weights.requires_grad


@pytest.mark.parametrize("name", CORRECTIONS)
def test_extreme_mismatch_and_empty_sequences_give_finite_weights(inputs, name):
    # Over 50 tokens the product is exp(+-1000): 0 or infinite also in float64.
    engine = [[100.0] * 50, [-100.0] * 50, [0.0] * 50]
    mask = [[True] * 50, [True] * 50, [False] * 50]
    batch = inputs([[0.0] * 50] * 3, [1.0] * 3, engine=engine, mask=mask)
    assert CORRECTIONS[name]()(batch).weights.isfinite().all()
    if name in {"sequence_tis", "mis"}:
        assert CORRECTIONS[name].model_validate({"ratio": "product"})(batch).weights.isfinite().all()


@pytest.mark.parametrize("bad", [{"low": 2.0, "high": 1.0}, {"low": 1.0, "high": 1.0}])
def test_a_band_must_be_ordered(bad):
    with pytest.raises(ValidationError, match="must be below high"):
        IcePop(**bad)
    with pytest.raises(ValidationError, match="must be below high"):
        Mis(**bad)


def test_mis_checks_a_single_bound_against_the_other_default():
    with pytest.raises(ValidationError, match=r"low 1.5 must be below high 1.001"):
        Mis(low=1.5)


def test_the_table_names_every_type():
    assert {name: choice().type for name, choice in CORRECTIONS.items()} == {name: name for name in CORRECTIONS}


def test_a_product_over_many_tokens_is_seen_to_have_no_meaning_left(inputs):
    """Two answers of 9000 tokens, each token off by a thousandth: one weight is all but gone, the other at its cap."""
    engine = [[1e-3] * 9000, [-1e-3] * 9000]
    batch = inputs([[0.0] * 9000] * 2, [1.0] * 2, engine=engine, mask=[[True] * 9000] * 2)
    product = SequenceTis(ratio="product", cap=2.0)(batch)
    assert values(product.metrics, "truncated") == 0.5
    assert values(product.metrics, "weight_mean") == pytest.approx((math.exp(-9.0) + 2.0) / 2)
    mean = SequenceTis(cap=2.0)(batch)
    assert values(mean.metrics, "weight_mean") == pytest.approx(math.cosh(1e-3))
