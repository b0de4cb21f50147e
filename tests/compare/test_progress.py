"""What is said while a comparison runs."""

import io
from pathlib import Path

import pytest

from qarl.compare.experiment import Comparison, choose
from qarl.compare.jobs import Job, jobs_in
from qarl.compare.progress import Narrator, headline
from tests.compare.conftest import result, write_files

ACCURACY = "eval/held_out/pass@1"


@pytest.fixture
def jobs(tmp_path: Path, comparison: Comparison) -> list[Job]:
    jobs = jobs_in(tmp_path, choose(comparison, [], []))
    for job in jobs:
        job.begin()
        job.console.touch()
    return jobs


def test_a_line_tells_how_a_run_ended():
    assert headline(result("a", 0, 0.84567), ACCURACY) == f"finished, {ACCURACY} 0.8457"
    stopped = result("a", 0, None, state="stopped", steps=3, reason="answers are empty")
    assert headline(stopped, ACCURACY) == "stopped at step 3: answers are empty"


def test_ends_are_recorded_and_counted(jobs: list[Job], comparison: Comparison):
    stream = io.StringIO()
    write_files(jobs[0].folder.path, [{"reward/mean": 1.0}], [{"step": 1, ACCURACY: 0.75}])
    with Narrator(comparison.experiment, jobs, stream) as narrator:
        narrator.begun(jobs[0], 1)
        narrator.passed()
        narrator.ended(jobs[0], 0, 0)
        narrator.begun(jobs[1], 1)
        narrator.stopping(1)
        narrator.ended(jobs[1], 130, 0)
    assert stream.getvalue().splitlines() == [
        "plain/seed-0 begins; 0 of 4 done, 1 running",
        f"plain/seed-0 finished, {ACCURACY} 0.75; 0 s; 1 of 4 done, 0 running",
        "warning: plain/seed-0 has not measured mismatch/mean_abs",
        "tbpo/seed-0 begins; 1 of 4 done, 1 running",
        "stopping: 1 running are asked to save; interrupt twice more to quit without",
        "tbpo/seed-0 not finished, 0 of 5 steps; left out of the tables; 0 s; 1 of 4 done, 0 running",
    ]
    assert (jobs[0].outcome().state, jobs[1].outcome().state) == ("finished", "unfinished")


def test_a_metric_that_nobody_measures_is_said_once(jobs: list[Job], comparison: Comparison):
    stream = io.StringIO()
    with Narrator(comparison.experiment, jobs, stream) as narrator:
        for job in jobs[:2]:
            write_files(job.folder.path, [{"reward/mean": 1.0, "mismatch/mean_ab": 0.0}])
            narrator.begun(job, 1)
            narrator.ended(job, 0, 0)
    assert stream.getvalue().count("has not measured mismatch/mean_abs; did you mean 'mismatch/mean_ab'") == 1
