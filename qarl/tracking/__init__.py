"""Where a run's figures go: files, TensorBoard, the terminal. Only the record, its metrics, must not fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from qarl.errors import RunError
from qarl.records import Group, GroupRewards
from qarl.roles import Tracker

log = logging.getLogger("qarl")


class Trackers:
    """Hands every report to every tracker; one that fails is logged, counted and not asked again.

    All but the record: what a run came to is told from it, so a run whose record cannot be written stops (RunError).
    """

    def __init__(self, record: Tracker, others: Sequence[Tracker]) -> None:
        self._record = record
        self._trackers = list(others)
        self.failures = 0

    def rollout(self, step: int, groups: Sequence[Group], rewards: Sequence[GroupRewards]) -> None:
        self._each(lambda tracker: tracker.rollout(step, groups, rewards))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.step(step, metrics))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._each(lambda tracker: tracker.evaluation(step, metrics))

    def close(self) -> None:
        self._trackers.append(self._record)  # all that matters of it is on the disk
        self._others(lambda tracker: tracker.close())

    def _each(self, act: Callable[[Tracker], None]) -> None:
        try:
            act(self._record)
        except OSError as error:
            raise RunError(
                f"the run's metrics cannot be written: {error}; make room, and go on with --resume"
            ) from error
        self._others(act)

    def _others(self, act: Callable[[Tracker], None]) -> None:
        for tracker in tuple(self._trackers):
            try:
                act(tracker)
            except Exception as error:  # Whatever a tracker does wrong (full disk, lost network), the run must go on.
                self.failures += 1
                self._trackers.remove(tracker)
                # What the disk says needs no trace of where it was said.
                trace = None if isinstance(error, OSError) else error
                said = f": {error}" if trace is None else ""
                log.error(
                    "%s failed and is off for the rest of this run%s", type(tracker).__name__, said, exc_info=trace
                )
