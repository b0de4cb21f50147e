"""Event files, read back with TensorBoard's own reader."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qarl.tracking.tensorboard import TensorBoard


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]


def test_metrics_and_evaluations_become_scalars(tmp_path: Path) -> None:
    writer = TensorBoard(tmp_path, first_step=0)
    writer.evaluation(0, {"eval/held_out/pass@1": 0.125})
    writer.step(0, {"reward/mean": 0.5, "eval/held_out/pass@1": 0.125})
    writer.step(1, {"reward/mean": 0.75})
    writer.close()
    assert scalars(tmp_path, "reward/mean") == [(0, 0.5), (1, 0.75)]
    assert scalars(tmp_path, "eval/held_out/pass@1") == [(0, 0.125)]


def test_a_resumed_run_hides_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path, first_step=0)
    for step in range(4):
        first.step(step, {"reward/mean": float(step)})
    first.close()
    resumed = TensorBoard(tmp_path, first_step=2)
    resumed.step(2, {"reward/mean": 9.0})
    resumed.close()
    assert scalars(tmp_path, "reward/mean") == [(0, 0.0), (1, 1.0), (2, 9.0)]
