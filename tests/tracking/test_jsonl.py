"""Metrics files: strict JSON, flushed lines, and no step twice after a resume."""

import json
import logging
import math
import os
import resource
from pathlib import Path

import pytest

from qarl.tracking.jsonl import MetricsFiles, json_line, read_lines, sift_lines


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


@pytest.mark.parametrize(
    "damaged",
    [b'{"step": 1, "rew', b"\x00" * 40, b"\xff\xfe", b"[" * 5000, b"9" * 5000, b"[1]", b'{"reward": 1.0}', b""],
    ids=["cut", "NUL", "no UTF-8", "brackets", "digits", "list", "no step", "empty"],
)
def test_a_damaged_line_is_passed_over_named_and_gone_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damaged: bytes
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0, "reward": 1.0}\n' + damaged + b'\n{"step": 2, "reward": 0.5}\n')
    with caplog.at_level(logging.WARNING, logger="qarl.tracking.jsonl"):
        assert [row["step"] for row in read_lines(path)] == [0, 2]
    assert f"{path}, line 2: passed over" in caplog.text
    MetricsFiles(tmp_path, first_step=3).close()
    assert path.read_text() == '{"step": 0, "reward": 1.0}\n{"step": 2, "reward": 0.5}\n'


def test_an_evaluation_of_the_weights_that_a_run_goes_on_from_is_kept(tmp_path: Path) -> None:
    first = MetricsFiles(tmp_path, first_step=0)
    for step in (0, 2, 4):
        first.evaluation(step, {"eval/held_out/pass@1": step / 10})
    first.close()
    MetricsFiles(tmp_path, first_step=2).close()
    rows = read_lines(tmp_path / "evaluations.jsonl")
    assert [(row["step"], row["eval/held_out/pass@1"]) for row in rows] == [(0, 0.0), (2, 0.2)]


def test_an_evaluation_made_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    first = MetricsFiles(tmp_path, first_step=0)
    for step in (0, 2):
        first.evaluation(step, {"eval/held_out/pass@1": 0.0})
    resumed = MetricsFiles(tmp_path, first_step=2)
    resumed.evaluation(2, {"eval/held_out/pass@1": 0.5})
    rows = read_lines(tmp_path / "evaluations.jsonl")
    assert [(row["step"], row["eval/held_out/pass@1"]) for row in rows] == [(0, 0.0), (2, 0.5)]


def test_a_number_json_lacks_becomes_null() -> None:
    assert json_line({"step": 1, "a": math.nan, "b": math.inf, "c": 0.1}) == (
        '{"step": 1, "a": null, "b": null, "c": 0.1}\n'
    )


def test_floats_come_back_exactly() -> None:
    value = 0.1 + 0.2
    assert json.loads(json_line({"value": value}))["value"] == value


def test_a_line_that_the_disk_refuses_is_an_error_once_and_does_not_come_later(tmp_path: Path) -> None:
    """In a child: the limit to the size of a file stands in for a full disk, and cannot be raised again."""
    child = os.fork()
    if child == 0:
        try:
            files = MetricsFiles(tmp_path, first_step=0)
            files.step(0, {"reward": 1.0})
            resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
            with pytest.raises(OSError, match="File too large"):
                files.step(1, {"reward": 0.123456789})
            files.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert read_lines(tmp_path / "metrics.jsonl") == [{"step": 0, "reward": 1.0}]
    MetricsFiles(tmp_path, first_step=1).step(1, {"reward": 0.5})
    assert [row["reward"] for row in read_lines(tmp_path / "metrics.jsonl")] == [1.0, 0.5]


def test_damaged_lines_are_numbered_and_one_cut_short_is_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nnothing\n{"step": 1}\n[]\n{"st')
    assert sift_lines(path) == ([{"step": 0}, {"step": 1}], [2, 4])
    assert sift_lines(tmp_path / "absent.jsonl") == ([], [])
