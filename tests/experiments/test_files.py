from pathlib import Path

import pytest

from qarl.compare.experiment import load_comparison

FILES = sorted((Path(__file__).resolve().parents[2] / "experiments").glob("*.toml"))


def test_there_are_experiments() -> None:
    assert FILES


@pytest.mark.parametrize("is_short", [False, True], ids=["whole", "short"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_run_of_an_experiment_has_a_recipe(path: Path, is_short: bool) -> None:
    comparison = load_comparison(path, is_short)
    assert comparison.experiment.baseline == "full-precision"
    assert {"full-precision", "unaligned", "qarl"} <= {arm.name for arm in comparison.arms}
    qarl, unaligned = (next(iter(comparison.arm(name).recipes.values())) for name in ("qarl", "unaligned"))
    assert qarl.alignment == "auto" and qarl.objective.type == "tbpo" and qarl.learner.updates_per_batch > 1
    assert unaligned.alignment == "none" and unaligned.scheme == qarl.scheme != "none"
