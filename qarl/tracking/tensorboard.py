"""TensorBoard event files, through TensorBoard's own writer (no TensorFlow)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from qarl.records import Group, GroupRewards


class TensorBoard:
    """Every metric as a scalar. A resumed run hides what an earlier file has from `first_step` on."""

    def __init__(self, folder: Path, first_step: int) -> None:
        self._writer = EventFileWriter(str(folder))
        if first_step:
            restart = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=restart))

    def rollout(self, step: int, groups: Sequence[Group], rewards: Sequence[GroupRewards]) -> None:
        """Completions have files of their own."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        # Evaluations came by themselves, before the step that reports them too.
        self._write(step, {name: value for name, value in metrics.items() if name[:5] != "eval/"})

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._write(step, metrics)

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))
        self._writer.flush()
