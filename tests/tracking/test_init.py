"""The fan-out: what one tracker does wrong must reach neither the run nor the other trackers."""

import logging
from collections.abc import Mapping, Sequence

import pytest

from qarl.errors import RunError
from qarl.records import Group, GroupRewards
from qarl.tracking import Trackers


class Recorder:
    def __init__(self) -> None:
        self.seen: list[str] = []

    def rollout(self, step: int, groups: Sequence[Group], rewards: Sequence[GroupRewards]) -> None:
        self.seen.append(f"rollout {step}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.seen.append(f"step {step}")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.seen.append(f"evaluation {step}")

    def close(self) -> None:
        self.seen.append("close")


class Failing(Recorder):
    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().step(step, metrics)
        raise OSError("disk full")


def test_a_failing_tracker_is_logged_once_counted_and_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    failing, healthy = Failing(), Recorder()
    trackers = Trackers(Recorder(), [failing, healthy])
    with caplog.at_level(logging.ERROR, logger="qarl"):
        for step in range(3):
            trackers.step(step, {})
    trackers.close()
    assert failing.seen == ["step 0"]
    assert healthy.seen == ["step 0", "step 1", "step 2", "close"]
    assert trackers.failures == 1
    (record,) = caplog.records
    assert record.getMessage() == "Failing failed and is off for the rest of this run: disk full"
    assert record.exc_info is None, "what the disk says needs no trace"


def test_a_run_whose_record_cannot_be_written_stops() -> None:
    failing, other = Failing(), Recorder()
    trackers = Trackers(failing, [other])
    with pytest.raises(RunError, match="the run's metrics cannot be written: disk full; make room"):
        trackers.step(0, {})
    trackers.close()
    assert (failing.seen, other.seen) == (["step 0", "close"], ["close"])


def test_an_interruption_is_not_a_tracker_s_failure() -> None:
    class Interrupting(Recorder):
        def step(self, step: int, metrics: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Trackers(Recorder(), [Interrupting()]).step(0, {})


def test_rollouts_and_evaluations_reach_every_tracker() -> None:
    first, second = Recorder(), Recorder()
    trackers = Trackers(first, [second])
    trackers.rollout(4, [], [])
    trackers.evaluation(5, {})
    assert first.seen == second.seen == ["rollout 4", "evaluation 5"]
