"""Tests of `qarl bench` need no steady figures."""

import pytest

from qarl.bench import roofline, timing


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REPEATS", 2)
    monkeypatch.setattr(timing, "BEST_OF_SECONDS", 0.01)
    monkeypatch.setattr(roofline, "PEAK_SIZES", ((64, 256, 256), (32, 128, 128)))
