from __future__ import annotations

import pytest
from pydantic import ValidationError

from qarl.rewards import shape
from qarl.rewards.shape import Format, Length, Repetition, overlong, tags_in_order

THINK = "<think>2 and 2\nis 4</think><answer>4</answer>"


def test_pattern_must_match_the_whole_text(make_prompt, make_completion):
    term = Format(pattern="<think>.*</think>.+")
    assert term.score(make_prompt(), make_completion(THINK)) == 1.0
    assert term.score(make_prompt(), make_completion("so: " + THINK)) == 0.0


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (THINK, True),
        ("before " + THINK + " after", True),
        ("<answer>4</answer><think>x</think>", False),
        ("<think>x<answer>4</answer></think>", False),
        (THINK + "<answer>5</answer>", False),
        ("<think>x</think><answer>4", False),
        ("4", False),
    ],
)
def test_tags_must_stand_once_and_in_order(text, right):
    assert tags_in_order(text, ("think", "answer")) is right


def test_a_pattern_that_runs_away_is_stopped(monkeypatch, make_prompt, make_completion):
    monkeypatch.setattr(shape, "PATTERN_SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        Format(pattern="(a|aa)+").score(make_prompt(), make_completion("a" * 100 + "!"))


def test_pattern_and_tags_must_both_hold(make_prompt, make_completion):
    term = Format(pattern=".*4</answer>", tags=("think", "answer"))
    assert term.score(make_prompt(), make_completion(THINK)) == 1.0
    assert term.score(make_prompt(), make_completion("4</answer>")) == 0.0
    assert term.score(make_prompt(), make_completion(THINK + " ")) == 0.0


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0.0), (60, 0.0), (61, -0.025), (80, -0.5), (100, -1.0), (101, -1.0), (1000, -1.0)]
)
def test_overlong_punishment_falls_linearly_over_the_buffer(length, penalty):
    assert overlong(length, max_tokens=100, buffer_tokens=40) == pytest.approx(penalty, abs=1e-12)


def test_length_counts_tokens_not_characters(make_prompt, make_completion):
    completion = make_completion("a long text " * 20, token_ids=[1] * 9)
    assert Length(max_tokens=10, buffer_tokens=4).score(make_prompt(), completion) == pytest.approx(-0.75)
    assert Length(token_cost=0.01).score(make_prompt(), completion) == pytest.approx(-0.09)
    assert Length(max_tokens=10, buffer_tokens=4, token_cost=0.01).score(make_prompt(), completion) == (
        pytest.approx(-0.84)
    )


@pytest.mark.parametrize(
    ("tokens", "ngram", "penalty"),
    [
        ([1, 2, 3, 4], 2, 0.0),
        ([1, 1, 1, 1], 2, -2 / 3),
        ([1, 2, 1, 2, 1], 2, -0.5),
        ([1, 2, 1, 2, 1], 1, -0.6),
        ([1, 2, 3], 4, 0.0),
    ],
)
def test_repetition_costs_the_share_of_ngrams_seen_before(make_prompt, make_completion, tokens, ngram, penalty):
    completion = make_completion("x", token_ids=tokens)
    assert Repetition(ngram=ngram).score(make_prompt(), completion) == pytest.approx(penalty)


@pytest.mark.parametrize(
    ("term", "settings", "problem"),
    [
        (Format, {}, "format needs a pattern, tags, or both"),
        (Format, {"pattern": "("}, "is not a regular expression"),
        (Length, {}, "length needs max_tokens"),
        (Length, {"max_tokens": 5}, "belong together"),
        (Length, {"max_tokens": 5, "buffer_tokens": 6}, "buffer_tokens 6 is above max_tokens 5"),
        (Repetition, {"ngram": 0}, "ngram"),
    ],
)
def test_impossible_settings_are_refused(term, settings, problem):
    with pytest.raises(ValidationError, match=problem):
        term.model_validate(settings)


def test_tags_may_be_a_list_as_in_toml():
    assert Format.model_validate({"tags": ["think", "answer"]}).tags == ("think", "answer")
