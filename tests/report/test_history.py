"""Run folders read for a page, and the ones that cannot be."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from qarl.errors import ConfigurationError
from qarl.report.history import read_runs, short_names
from qarl.runfolder import RunFolder
from tests.report.conftest import EVALUATIONS, LOG, STEPS


def test_a_history_is_what_the_files_say(run: Path):
    (history,) = read_runs([run])
    assert (history.name, history.steps, history.evaluations) == ("first", STEPS, EVALUATIONS)
    assert (history.done, history.is_finished, history.reason, history.damage) == (3, True, None, ())
    assert history.warnings == ["step 2: answers repeat themselves\n  | and this line belongs to it"]


def test_an_error_at_the_end_of_the_log_is_why_a_run_stopped(make_run: Callable[..., Path]):
    ended = LOG + "2026-11-30 10:00:03,000 ERROR stopped after step 3: answers are empty\n"
    (history,) = read_runs([make_run("a", log=ended)])
    assert history.reason == "stopped after step 3: answers are empty"
    assert not history.is_finished
    (resumed,) = read_runs([make_run("b", log=ended + "2026-11-30 10:00:09,000 INFO finished 3 steps\n")])
    assert (resumed.reason, resumed.is_finished) == (None, True)


def test_a_run_that_holds_its_lock_is_running(run: Path):
    with RunFolder(run).lock():
        (history,) = read_runs([run])
    assert history.is_running and not history.is_finished
    assert not read_runs([run])[0].is_running


def test_names_are_as_short_as_they_can_be(make_run: Callable[..., Path]):
    assert short_names([Path("/r/a"), Path("/r/b")]) == ["a", "b"]
    assert short_names([Path("/x/a"), Path("/y/a")]) == ["x/a", "y/a"]
    assert short_names([Path("/a"), Path("/x/a")]) == ["/a", "x/a"]


def test_damaged_lines_are_passed_over_and_named(run: Path):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/mean"\n[]\n')
    (history,) = read_runs([run])
    assert history.steps == STEPS
    assert history.damage == (f"{run / 'metrics.jsonl'}: damaged lines are passed over: 4, 5",)


def test_what_cannot_be_reported_on_is_refused(run: Path, tmp_path: Path):
    with pytest.raises(ConfigurationError, match=f"{tmp_path}: is no run folder, it has no recipe.toml"):
        read_runs([tmp_path])
    with pytest.raises(ConfigurationError, match="first: is named twice"):
        read_runs([run, tmp_path / "x" / ".." / "first"])
    (run / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigurationError, match=r"metrics\.jsonl: has no finished step to report on; wait for"):
        read_runs([run])
    (run / "metrics.jsonl").write_text("nothing\n")
    with pytest.raises(ConfigurationError, match=re.escape("(%s: damaged lines" % (run / "metrics.jsonl"))):
        read_runs([run])
