from pathlib import Path

import pytest

from qarl.compare.experiment import load_comparison
from qarl.compare.results import read_results

FILES = sorted((Path(__file__).resolve().parents[2] / "experiments").glob("*.toml"))


def test_there_are_experiments() -> None:
    assert FILES


@pytest.mark.parametrize("is_short", [False, True], ids=["whole", "short"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_run_of_an_experiment_has_a_recipe_of_its_own(path: Path, is_short: bool) -> None:
    comparison = load_comparison(path, is_short)
    recipes = [arm.recipes[seed].model_dump_json() for arm in comparison.arms for seed in comparison.seeds]
    assert len(recipes) == len(set(recipes)) >= 2
    # With one update a batch all ratios are 1, and objectives differ in nothing.
    assert all(arm.recipes[seed].learner.updates_per_batch > 1 for arm in comparison.arms for seed in comparison.seeds)


@pytest.mark.parametrize("name", ["addition", "sorting", "smollm2-sums"])
def test_the_core_of_a_comparison_is_the_papers(name: str) -> None:
    comparison = load_comparison(next(path for path in FILES if path.stem == name))
    full, unaligned, qarl = (
        next(iter(comparison.arm(name).recipes.values())) for name in ("full-precision", "unaligned", "qarl")
    )
    assert full.scheme == "none" and unaligned.scheme == qarl.scheme != "none"
    assert full.objective.type == unaligned.objective.type == "grpo" and qarl.objective.type == "tbpo"
    assert qarl.alignment == "auto" and unaligned.alignment == "none"


@pytest.mark.parametrize("path", sorted((FILES[0].parent / "results").glob("*.json")), ids=lambda path: path.stem)
def test_kept_results_are_those_of_their_experiment(path: Path) -> None:
    comparison = load_comparison(FILES[0].parent / f"{path.stem}.toml")
    results = read_results(path, comparison)
    assert any(run.counts for run in results.runs)
