"""Signs of sickness: when they count, and what they say."""

import math

import pytest

from qarl.health import SIGNS, Health, Rule, Watch


def test_every_sign_has_a_rule_and_every_rule_a_sign() -> None:
    assert set(SIGNS) == set(Health.model_fields)


def test_a_sign_counts_once_it_has_shown_for_so_many_steps_in_a_row() -> None:
    watch = Watch(Health(repetition=Rule(limit=0.5, steps=2, action="stop")))
    readings = [0.5, 0.49, 0.6, 0.5, 0.9, 0.1, 0.7, 0.8]
    stops = [bool(watch.look({"completion/repetition": reading})[1]) for reading in readings]
    assert stops == [False, False, False, True, True, False, False, True]


def test_a_warning_is_said_once_for_each_time_that_it_holds() -> None:
    watch = Watch(Health(repetition=Rule(limit=0.5, steps=1, action="warn")))
    readings = [0.5, 0.6, 0.1, 0.7]
    assert [len(watch.look({"completion/repetition": one})[0]) for one in readings] == [1, 0, 0, 1]


def test_what_is_low_counts_to_its_limit_and_what_is_no_number_never() -> None:
    watch = Watch(Health(entropy=Rule(limit=0.1, steps=1, action="warn")))
    found = [watch.look({"objective/entropy": reading})[0] for reading in (0.2, math.nan, 0.1)]
    assert found[:2] == [[], []]
    assert found[2] == [
        "the policy has almost no choice left to learn from: objective/entropy = 0.1 for 1 steps in a row "
        "(health.entropy.limit = 0.1)"
    ]


def test_an_absent_reading_breaks_the_row() -> None:
    watch = Watch(Health(empty=Rule(limit=0.5, steps=2, action="warn")))
    found = [watch.look(metrics)[0] for metrics in ({"completion/empty": 1.0}, {}, {"completion/empty": 1.0})]
    assert found == [[], [], []]


def test_what_is_left_out_of_a_rule_stays_as_it_is_by_default() -> None:
    assert Health.model_validate({"empty": {"steps": 7}}).empty == Rule(limit=0.9, steps=7, action="stop")


@pytest.mark.parametrize("name", SIGNS)
def test_every_sign_can_be_silenced(name: str) -> None:
    bad = 1e9 if SIGNS[name].side == "from" else -1e9
    loud = Watch(Health(**{name: Rule(limit=0.0, steps=1, action="warn")}))
    silent = Watch(Health(**{name: Rule(limit=0.0, steps=1, action="off")}))
    assert len(loud.look({SIGNS[name].metric: bad})[0]) == 1
    assert silent.look({SIGNS[name].metric: bad}) == ([], [])


def test_a_relative_limit_is_counted_from_the_first_reading() -> None:
    watch = Watch(Health(repetition=Rule(limit=0.25, relative=True, steps=1, action="stop")))
    readings = [math.nan, 0.5, 0.74, 0.75, 0.3]
    found = [watch.look({"completion/repetition": one})[1] for one in readings]
    assert [bool(one) for one in found] == [False, False, False, True, False]
    assert found[3] == [
        "answers repeat themselves: completion/repetition = 0.75 for 1 steps in a row "
        "(health.repetition.limit = 0.25 above the first reading, 0.5)"
    ]


def test_nothing_is_shown_against_a_first_reading_that_is_not_there() -> None:
    watch = Watch(Health(repetition=Rule(limit=-1.0, relative=True, steps=1, action="stop")))
    assert watch.look({}) == ([], [])
