"""What is read from a run's files, with numbers worked out by hand; and that it is kept and read back whole."""

from pathlib import Path
from typing import Any

import pytest

from qarl.compare.experiment import Comparison, Experiment, choose, load_comparison
from qarl.compare.jobs import Job, jobs_in
from qarl.compare.results import Arrival, Results, measure, read_results
from qarl.errors import ConfigurationError
from tests.compare.conftest import EXPERIMENT, result, results_of, write_files

ACCURACY = "eval/held_out/pass@1"


def step(reward: float | None, seconds: float = 2.0, **given: Any) -> dict[str, Any]:
    """100 tokens in a second and a half of rollout, half a second of learner."""
    rollout = {"perf/rollout_tokens_per_s": 100 / 1.5, "time/rollout": 1.5, "time/learner": 0.25}
    return {"reward/mean": reward, "time/step": seconds, **rollout, **given}


@pytest.fixture
def job(tmp_path: Path, comparison: Comparison) -> Job:
    job = jobs_in(tmp_path, choose(comparison, [], []))[0]
    job.begin()
    job.console.touch()
    job.end(0, keep_checkpoints=False)
    return job


def test_a_run_is_measured_by_its_files(job: Job, comparison: Comparison):
    steps = [step(0.0), step(0.4), step(0.5), step(0.7, **{"mismatch/bit_equal": 1.0})]
    write_files(job.folder.path, steps, [{"step": 0, ACCURACY: 0.1}, {"step": 4, ACCURACY: 0.61234, "eval/other": 1.0}])
    found = measure(job, comparison.experiment)
    assert (found.name, found.state, found.steps, found.planned) == ("plain/seed-0", "finished", 4, 5)
    assert (found.tokens, found.seconds, found.alignment) == (400, 8.0, "exact")
    # The last evaluation, in four digits; of the reward the mean over a window of 2.
    assert found.figures == {ACCURACY: 0.6123, "reward/mean": 0.6}
    assert found.evaluations == [{"step": 0, ACCURACY: 0.1}, {"step": 4, ACCURACY: 0.6123}]
    # Means of two: 0.2, 0.45, 0.6. The third is the first at 0.5 or above, after 4 steps.
    assert found.arrivals == [Arrival(steps=4, tokens=400, seconds=8.0)]
    assert found.curves == {"step": [1, 2, 3, 4], "reward/mean": [0.0, 0.4, 0.5, 0.7]}
    assert found.parts == {"rollout": 6.0, "learner": 1.0, "other": 1.0}


def test_a_target_may_be_one_of_evaluations(job: Job, comparison: Comparison):
    table = comparison.experiment.model_dump() | {"target_metric": ACCURACY, "targets": (0.5, 0.95)}
    write_files(job.folder.path, [step(0.0)] * 4, [{"step": 0, ACCURACY: 0.1}, {"step": 3, ACCURACY: 0.5}])
    found = measure(job, Experiment(**table))
    assert found.arrivals == [Arrival(steps=3, tokens=300, seconds=6.0), None]


def test_a_run_that_has_not_begun_has_nothing(tmp_path: Path, comparison: Comparison):
    found = measure(jobs_in(tmp_path, choose(comparison, [], []))[0], comparison.experiment)
    assert (found.state, found.steps, found.tokens, found.seconds, found.figures) == ("unfinished", 0, 0, 0.0, {})
    assert not found.counts


def test_what_is_not_finite_is_a_gap(job: Job, comparison: Comparison):
    write_files(job.folder.path, [step(0.5), step(None), step(0.7)])
    found = measure(job, comparison.experiment)
    assert found.curves["reward/mean"] == [0.5, None, 0.7]
    assert found.figures["reward/mean"] == 0.7


def test_curves_of_long_runs_are_means_of_as_many_steps_for_all_seeds(experiment: Path, tmp_path: Path):
    experiment.write_text(EXPERIMENT.replace('scheme = "none"', 'scheme = "none"\nsteps = 250'))
    comparison = load_comparison(experiment)
    job = jobs_in(tmp_path, choose(comparison, [], []))[0]
    write_files(job.folder.path, [step(float(place)) for place in range(7)])  # 250 steps are 84 means of 3
    found = measure(job, comparison.experiment)
    assert found.curves == {"step": [3, 6, 7], "reward/mean": [1.0, 4.0, 6.0]}


def test_results_are_read_back_as_they_were_kept(tmp_path: Path, comparison: Comparison):
    results = results_of(
        comparison,
        result("plain", 0, 0.5, arrivals=[Arrival(steps=3, tokens=300, seconds=6.0)]),
        result("tbpo", 0, 0.75),
    )
    path = tmp_path / "results.json"
    path.write_text(results.to_json())
    assert read_results(path, comparison) == results
    lines = [line.strip()[:13] for line in results.to_json().splitlines() if '"seed":0' in line]
    assert lines == ['{"arm":"plain', '{"arm":"tbpo"'], "a line for every run: a change of one is a change of one line"


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("window = 2", "window = 3", "other window;"),
        ("1e-4", "1e-5", "other arms.tbpo;"),
        ("[arms.tbpo]", "[arms.new]\n[arms.tbpo]", "other arms.new;"),
    ],
)
def test_results_of_another_experiment_are_refused(
    tmp_path: Path, experiment: Path, comparison: Comparison, old: str, new: str, key: str
):
    path = tmp_path / "results.json"
    path.write_text(results_of(comparison, result("plain", 0, 0.5)).to_json())
    experiment.write_text(EXPERIMENT.replace(old, new))
    with pytest.raises(ConfigurationError, match=key):
        read_results(path, load_comparison(experiment))


def test_a_title_may_change(tmp_path: Path, experiment: Path, comparison: Comparison):
    path = tmp_path / "results.json"
    path.write_text(results_of(comparison, result("plain", 0, 0.5)).to_json())
    experiment.write_text(EXPERIMENT.replace("full precision, GRPO", "plain"))
    assert read_results(path, load_comparison(experiment)).arms["plain"].title == "plain"


def test_a_file_that_holds_no_results_is_named(tmp_path: Path, comparison: Comparison):
    path = tmp_path / "results.json"
    with pytest.raises(ConfigurationError, match=r"results\.json: cannot be read"):
        read_results(path, comparison)
    path.write_text('{"runs": []}')
    with pytest.raises(ConfigurationError, match=r"results\.json: name: is required"):
        read_results(path, comparison)


def test_results_are_small_enough_to_keep(comparison: Comparison):
    curve = [round(0.1234 + 0.001 * place, 4) for place in range(100)]
    curves = dict.fromkeys(("reward/mean", "completion/error_tokens", "mismatch/mean_abs"), curve)
    run = result("plain", 0, 0.5, curves={"step": list(range(1, 101)), **curves})
    results = Results.of("trial", comparison, [run] * 60)
    assert len(results.to_json()) < 300_000
