"""Medians of works that take turns, and the best of many calls, by a clock that the test sets."""

import pytest

from qarl.bench import timing


def test_the_best_of_some_calls_is_taken_and_the_first_only_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # Readings: the deadline's, then start and end of the timed calls, of 3, 1 and 2 seconds.
    clock = iter([0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 4.0, 4.0, 4.0, 6.0, 9.0])
    monkeypatch.setattr(timing, "BEST_OF_SECONDS", 5.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    calls: list[int] = []
    assert timing.best_seconds(lambda: calls.append(1)) == 1.0
    assert len(calls) == 4


def test_works_take_turns_and_the_warm_up_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Start and end of a, then of b, in the warm-up and two repetitions.
    clock = iter([0.0, 9.0, 9.0, 18.0, 18.0, 19.0, 19.0, 23.0, 23.0, 25.0, 25.0, 30.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    calls: list[str] = []
    found = timing.repeated_seconds(lambda: calls.append("a"), lambda: calls.append("b"), what="both", repeats=2)
    assert found == [[1.0, 2.0], [4.0, 5.0]]
    assert calls == ["a", "b"] * 3
    said = capsys.readouterr()
    assert said.err.splitlines()[:2] == ["both 0: 9.000 + 9.000 s (warm-up)", "both 1: 1.000 + 4.000 s"]
    assert said.out == ""


def test_peak_memory_is_in_bytes() -> None:
    assert timing.peak_memory_bytes() > 1 << 26  # torch alone is larger
