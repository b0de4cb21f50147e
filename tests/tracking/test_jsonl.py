"""Metrics files: strict JSON, flushed lines, and no step twice after a resume."""

import json
import math
from pathlib import Path

from qarl.tracking.jsonl import MetricsFiles, json_line, read_lines


def test_every_step_is_one_line_readable_while_the_run_goes_on(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path, first_step=0)
    files.step(0, {"reward": 0.5})
    files.step(1, {"reward": 0.25})
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 0, "reward": 0.5}, {"step": 1, "reward": 0.25}]
    files.close()


def test_evaluations_have_their_own_file(tmp_path: Path) -> None:
    files = MetricsFiles(tmp_path, first_step=0)
    files.evaluation(0, {"eval/held_out/pass@1": 0.1})
    files.close()
    assert read_lines(tmp_path / "evaluations.jsonl") == [{"step": 0, "eval/held_out/pass@1": 0.1}]
    assert read_lines(tmp_path / "metrics.jsonl") == []


def test_a_resumed_run_drops_the_lines_it_will_write_again(tmp_path: Path) -> None:
    first = MetricsFiles(tmp_path, first_step=0)
    for step in range(4):
        first.step(step, {"reward": float(step)})
    first.close()
    resumed = MetricsFiles(tmp_path, first_step=2)
    resumed.step(2, {"reward": 9.0})
    resumed.close()
    rows = read_lines(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["reward"]) for row in rows] == [(0, 0.0), (1, 1.0), (2, 9.0)]


def test_a_line_cut_short_by_a_kill_is_dropped_on_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "reward": 1.0}\n{"step": 1, "rew')
    files = MetricsFiles(tmp_path, first_step=1)
    files.step(1, {"reward": 0.5})
    files.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]


def test_a_number_json_lacks_becomes_null() -> None:
    assert json_line({"step": 1, "a": math.nan, "b": math.inf, "c": 0.1}) == (
        '{"step": 1, "a": null, "b": null, "c": 0.1}\n'
    )


def test_floats_come_back_exactly() -> None:
    value = 0.1 + 0.2
    assert json.loads(json_line({"value": value}))["value"] == value
