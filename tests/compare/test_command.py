"""`qarl compare` as a whole: with stand-ins for training, and once with the tiny model."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from qarl.cli import run_command
from qarl.compare.command import compare, default_processes, rebuild
from qarl.compare.experiment import Comparison
from qarl.errors import ConfigurationError, RunError
from qarl.runfolder import RunLock
from tests.compare.conftest import EXPERIMENT, stand_in

ALL = ["plain/seed-0", "tbpo/seed-0", "plain/seed-1", "tbpo/seed-1"]


def run(experiment: Path, ways: dict[str, str], **given: Any) -> tuple[dict[str, Any], list[str]]:
    """The answer, and the names of the runs that began."""
    stream = io.StringIO()
    out = given.pop("out", experiment.parent / "out")
    answer = compare(experiment, out=out, command=stand_in(ways), stream=stream, processes=2, **given)
    return answer, [line.split()[0] for line in stream.getvalue().splitlines() if " begins;" in line]


def test_what_is_done_is_not_repeated_and_what_failed_only_when_asked(experiment: Path):
    answer, begun = run(experiment, {"plain/seed-0": "stops", "tbpo/seed-1": "fails"})
    assert begun == ALL
    assert answer["runs"] == {"stopped": 1, "finished": 2, "failed": 1}
    assert run(experiment, {})[1] == []
    answer, begun = run(experiment, {}, retry_failed=True)
    assert begun == ["tbpo/seed-1"]
    assert answer["runs"] == {"stopped": 1, "finished": 3}


def test_only_the_arms_and_seeds_chosen_are_run(experiment: Path):
    answer, begun = run(experiment, {}, arms=["tbpo"], seeds=["1"])
    assert begun == ["tbpo/seed-1"]
    assert answer["runs"] == {"unfinished": 3, "finished": 1}
    assert run(experiment, {}, runs=False)[1] == []


def test_table_page_and_results_are_written_and_made_again_from_results_alone(experiment: Path, tmp_path: Path):
    out = tmp_path / "out"
    run(experiment, {"tbpo/seed-0": "stops"})
    table = (out / "table.md").read_text()
    assert "- tbpo/seed-0: stopped at step 0: answers are empty" in table
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "results.json").write_text((out / "results.json").read_text())
    rebuild(experiment, kept / "results.json", False, None)
    assert (kept / "table.md").read_text().replace("# trial", "") == table.replace("# trial", "")
    assert (kept / "page.html").exists()


def test_the_short_version_lies_apart(experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    _, begun = run(experiment, {}, is_short=True, out=None)
    assert begun == ["plain/seed-7", "tbpo/seed-7"]
    assert (tmp_path / "runs" / "trial-short" / "tbpo" / "seed-7" / "outcome.json").exists()


def test_where_every_run_fails_so_does_the_comparison(experiment: Path, tmp_path: Path):
    with pytest.raises(RunError, match=r"no run finished: plain/seed-0: nowhere\.py does not exist; check the path"):
        run(experiment, dict.fromkeys(ALL, "fails"))
    assert (tmp_path / "out" / "results.json").exists()


def test_a_comparison_or_a_run_that_goes_on_elsewhere_is_left_alone(experiment: Path, tmp_path: Path):
    out = tmp_path / "out"
    with RunLock(out), pytest.raises(ConfigurationError, match="or choose another folder with --out"):
        run(experiment, {})
    with RunLock(out / "tbpo" / "seed-1"), pytest.raises(ConfigurationError, match="seed-1: another process runs it"):
        run(experiment, {})


def test_processes_are_as_many_as_cores_have_threads_for(comparison: Comparison, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda who: set(range(6)), raising=False)
    monkeypatch.setattr("qarl.compare.command.missing_for_cuda", lambda: "no GPU")
    assert [default_processes(comparison, threads) for threads in (1, 2, 4, 9)] == [6, 3, 1, 1]
    monkeypatch.setattr("qarl.compare.command.missing_for_cuda", lambda: None)
    assert default_processes(comparison, 1) == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--arms", "tbop"], "--arms tbop: is no arm of trial; did you mean 'tbpo'?"),
        (["--from", "results.json", "--no-run"], "--from runs nothing: leave --arms"),
        (["--from", "absent.json"], "--from absent.json: cannot be read"),
        (["--processes", "0"], "Must be >= 1"),
    ],
)
def test_misuse_is_one_line(experiment: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str):
    assert run_command(["compare", str(experiment), *arguments]) == 2
    said = capsys.readouterr().err.strip()
    assert reason in said
    assert "\n" not in said


def test_the_tiny_model_is_trained_and_compared(experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    experiment.write_text(EXPERIMENT.replace("steps = 3", "steps = 1\neval.count = 2\nprompts_per_step = 2"))
    arguments = ["compare", str(experiment), "--short", "--arms", "tbpo", "--out", str(tmp_path / "out"), "--json"]
    assert run_command(arguments) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["runs"] == {"unfinished": 1, "finished": 1}
    assert "| tbpo " in (tmp_path / "out" / "table.md").read_text()
    assert not (tmp_path / "out" / "tbpo" / "seed-7" / "checkpoints").exists()
    (line,) = [
        json.loads(one)
        for one in (tmp_path / "out" / "results.json").read_text().splitlines()
        if '"tbpo","seed"' in one
    ]
    assert (line["steps"], line["alignment"], line["curves"]["step"]) == (1, "exact", [1])
    assert line["tokens"] > 0
