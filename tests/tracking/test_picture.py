"""The summary picture, drawn from metrics files."""

import math
from pathlib import Path

from qarl.tracking.jsonl import json_line
from qarl.tracking.picture import draw, held_out_names, points


def test_points_skip_steps_without_the_metric_and_gap_at_null() -> None:
    rows = [{"step": 0, "a": 1.0}, {"step": 1}, {"step": 2, "a": None}]
    steps, values = points(rows, "a")
    assert steps == [0, 2]
    assert values[0] == 1.0
    assert math.isnan(values[1])


def test_held_out_curves_are_the_pass_at_k_figures() -> None:
    rows = [{"step": 0, "eval/s/pass@1": 0.1, "eval/s/length_mean": 3.0}, {"step": 5, "eval/s/pass@4": 0.2}]
    assert held_out_names(rows) == ["eval/s/pass@1", "eval/s/pass@4"]


def test_the_picture_shows_what_was_measured(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    full = tmp_path / "full"
    for folder in (empty, full):
        folder.mkdir()
    rows = [
        {"step": step, "reward/mean": step / 4, "mismatch/max_abs": 0.0, "completion/length_mean": 8.0}
        for step in range(4)
    ]
    (full / "metrics.jsonl").write_text("".join(json_line(row) for row in rows))
    (full / "evaluations.jsonl").write_text(json_line({"step": 0, "eval/s/pass@1": 0.1}))
    pictures = [draw(folder).read_bytes() for folder in (empty, full)]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert len(pictures[1]) > len(pictures[0])
