"""How a run ended, as its exit code and its last words tell; and runs of other recipes are never mixed in."""

import signal
from pathlib import Path

import pytest

from qarl.compare.experiment import Comparison, choose, load_comparison
from qarl.compare.jobs import Outcome, jobs_in, outcome_of
from qarl.errors import ConfigurationError
from qarl.recipe import load_recipe
from tests.compare.conftest import EXPERIMENT


@pytest.mark.parametrize(
    ("code", "said", "outcome"),
    [
        (0, "", Outcome("finished")),
        (130, "qarl: interrupted", Outcome("unfinished")),
        (-signal.SIGINT, "", Outcome("unfinished")),
        (-signal.SIGKILL, "step 1/5", Outcome("failed", "ended by SIGKILL")),
        (
            1,
            "step\nqarl: stopped after step 3: answers are empty: completion/empty = 1; /a/3 is the last checkpoint\n",
            Outcome("stopped", "answers are empty: completion/empty = 1"),
        ),
        (1, "qarl: the disk is full; no checkpoint was saved yet", Outcome("failed", "the disk is full")),
        (2, "qarl: a: is wrong\nb: is wrong\n", Outcome("failed", "a: is wrong b: is wrong")),
        (1, "Traceback\n  line\nKeyError: 'x'\n", Outcome("failed", "KeyError: 'x'")),
        (1, "", Outcome("failed", "it said nothing")),
    ],
)
def test_an_end_is_read_from_the_exit_code_and_the_last_words(code: int, said: str, outcome: Outcome):
    assert outcome_of(code, said) == outcome


@pytest.mark.parametrize(("code", "keeps"), [(0, False), (1, False), (2, True), (130, True)])
def test_checkpoints_go_where_nothing_goes_on_from_them(tmp_path: Path, comparison: Comparison, code: int, keeps: bool):
    (job, *_) = jobs_in(tmp_path, choose(comparison, [], []))
    job.begin()
    job.folder.checkpoints.mkdir()
    job.console.write_text("qarl: stopped after step 1: answers are empty" if code == 1 else "qarl: no such file")
    assert job.outcome() == Outcome("unfinished")
    outcome = job.end(code, keep_checkpoints=False)
    assert job.outcome() == Outcome(outcome.state, outcome.reason)
    assert job.folder.checkpoints.exists() == keeps


def test_checkpoints_stay_where_the_experiment_keeps_them(tmp_path: Path, comparison: Comparison):
    (job, *_) = jobs_in(tmp_path, choose(comparison, [], []))
    job.begin()
    job.folder.checkpoints.mkdir()
    job.console.touch()
    job.end(0, keep_checkpoints=True)
    assert job.folder.checkpoints.exists()


def test_a_run_is_given_its_arms_recipe(tmp_path: Path, comparison: Comparison):
    job = jobs_in(tmp_path, choose(comparison, ["tbpo"], ["1"]))[0]
    job.begin()
    assert (job.name, job.folder.path) == ("tbpo/seed-1", tmp_path / "tbpo" / "seed-1")
    assert load_recipe(job.asked) == comparison.arms[1].recipes[1]


def test_a_run_of_another_recipe_is_refused_with_its_key(tmp_path: Path, experiment: Path, comparison: Comparison):
    for job in jobs_in(tmp_path, choose(comparison, [], [])):
        job.begin()
    experiment.write_text(EXPERIMENT.replace("1e-4", "1e-5"))
    with pytest.raises(ConfigurationError, match=r"tbpo/seed-0: holds a run with other values of learner\.lr; put"):
        jobs_in(tmp_path, choose(load_comparison(experiment), [], []))


def test_how_many_checkpoints_are_kept_may_change(tmp_path: Path, experiment: Path, comparison: Comparison):
    for job in jobs_in(tmp_path, choose(comparison, [], [])):
        job.begin()
    experiment.write_text("keep_checkpoints = true\n" + EXPERIMENT)
    assert len(jobs_in(tmp_path, choose(load_comparison(experiment), [], []))) == 4


def test_a_run_that_no_comparison_began_is_refused(tmp_path: Path, comparison: Comparison):
    folder = tmp_path / "plain" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "recipe.toml").touch()
    with pytest.raises(ConfigurationError, match="holds a run that no comparison started"):
        jobs_in(tmp_path, choose(comparison, [], []))
