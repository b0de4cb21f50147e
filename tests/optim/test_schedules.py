"""Tables worked out by hand."""

import pytest
from pydantic import TypeAdapter, ValidationError

from qarl.errors import ConfigurationError
from qarl.optim import SCHEDULES, Constant, Cosine, Linear, ScheduleConfig


def factors(schedule: Constant | Linear | Cosine, steps: int, total: int) -> list[float]:
    return [schedule(step, total) for step in range(steps)]


def test_constant_is_one_from_the_first_step() -> None:
    assert factors(Constant(), 3, 3) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", [Constant(warmup_steps=4), Linear(warmup_steps=4), Cosine(warmup_steps=4)])
def test_warm_up_rises_in_equal_parts_and_never_starts_at_zero(schedule: Constant | Linear | Cosine) -> None:
    assert factors(schedule, 5, 8) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_linear_falls_in_equal_parts_and_the_last_step_still_learns() -> None:
    assert factors(Linear(), 4, 4) == [1.0, 0.75, 0.5, 0.25]


def test_linear_falls_to_its_final_fraction() -> None:
    expected = [1.0, 0.875, 0.75, 0.625, 0.5, 0.5]
    assert factors(Linear(final_fraction=0.5), 6, 4) == pytest.approx(expected)


def test_linear_decay_is_measured_after_warm_up() -> None:
    assert factors(Linear(warmup_steps=2), 6, 6) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])


def test_cosine_is_half_way_at_half_time() -> None:
    # (1 + cos(pi p)) / 2 at p = 0, 1/3, 1/2, 2/3, 1.
    cosine = Cosine()
    assert [cosine(step, 6) for step in (0, 2, 3, 4, 6)] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_cosine_falls_to_its_final_fraction_and_stays_there() -> None:
    cosine = Cosine(warmup_steps=2, final_fraction=0.2)
    assert [cosine(step, 6) for step in (2, 4, 6, 100)] == pytest.approx([1.0, 0.6, 0.2, 0.2])


@pytest.mark.parametrize("schedule", [Constant(warmup_steps=9), Linear(warmup_steps=9), Cosine(warmup_steps=9)])
def test_warm_up_longer_than_the_run_is_refused_at_the_first_step(schedule: Constant | Linear | Cosine) -> None:
    with pytest.raises(ConfigurationError, match="warmup_steps = 9 is more than the 8 steps"):
        schedule(0, 8)


@pytest.mark.parametrize("schedule", [Linear(warmup_steps=4), Cosine(warmup_steps=4)])
def test_warm_up_may_fill_the_run(schedule: Linear | Cosine) -> None:
    assert factors(schedule, 4, 4) == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_table_and_the_union_name_the_same_choices(name: str) -> None:
    schedule = TypeAdapter(ScheduleConfig).validate_python({"type": name})
    assert type(schedule) is SCHEDULES[name]


def test_negative_warm_up_is_refused() -> None:
    with pytest.raises(ValidationError, match="warmup_steps"):
        Linear(warmup_steps=-1)
