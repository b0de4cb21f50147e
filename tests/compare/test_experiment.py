"""Experiment files: what arms are made of them, and one clear line for what is wrong."""

from pathlib import Path

import pytest

from qarl.compare.experiment import Comparison, choose, load_comparison
from qarl.errors import ConfigurationError
from qarl.objectives import Grpo, Tbpo
from tests.compare.conftest import EXPERIMENT


def refusal(path: Path, old: str, new: str, is_short: bool = False) -> str:
    assert old in EXPERIMENT
    path.write_text(EXPERIMENT.replace(old, new))
    with pytest.raises(ConfigurationError) as caught:
        load_comparison(path, is_short)
    return str(caught.value)


def test_an_arm_changes_the_keys_that_it_names(comparison: Comparison):
    plain, tbpo = comparison.arms
    assert (plain.title, tbpo.title) == ("full precision, GRPO", "tbpo")
    assert plain.keys == {"scheme": "none", "objective.type": "grpo"}
    assert [recipe.scheme for recipe in plain.recipes.values()] == ["none", "none"]
    assert isinstance(plain.recipes[0].objective, Grpo)
    assert isinstance(tbpo.recipes[0].objective, Tbpo)
    assert (tbpo.recipes[1].learner.lr, tbpo.recipes[1].scheme, tbpo.recipes[1].seed) == (1e-4, "w8a8-int8", 1)


def test_the_recipe_lies_beside_the_experiment(tmp_path: Path):
    (tmp_path / "base.toml").write_text(
        'model = "tiny"\n[prompts]\ntype = "arithmetic"\n[[rewards]]\ntype = "answer"\n'
    )
    path = tmp_path / "one.toml"
    path.write_text('recipe = "base.toml"\nseeds = [3]\nmetric = "reward/mean"\n[arms.only]\n')
    comparison = load_comparison(path)
    assert (comparison.name, comparison.arms[0].recipes[3].model) == ("one", "tiny")


def test_the_short_version_has_its_own_seeds_and_keys(experiment: Path):
    comparison = load_comparison(experiment, is_short=True)
    assert comparison.seeds == (7,)
    assert [arm.recipes[7].steps for arm in comparison.arms] == [3, 3]


def test_runs_keep_one_checkpoint_unless_more_are_wanted(experiment: Path):
    assert load_comparison(experiment).arms[0].recipes[0].checkpoint.keep_last == 1
    experiment.write_text("keep_checkpoints = true\n" + EXPERIMENT)
    assert load_comparison(experiment).arms[0].recipes[0].checkpoint.keep_last == 2


def test_runs_come_seed_by_seed_so_that_an_interruption_leaves_whole_seeds(comparison: Comparison):
    def names(*chosen: list[str]) -> list[tuple[str, int]]:
        return [(arm.name, seed) for arm, seed in choose(comparison, *chosen)]

    assert names([], []) == [("plain", 0), ("tbpo", 0), ("plain", 1), ("tbpo", 1)]
    assert names(["tbpo"], ["1"]) == [("tbpo", 1)]


def test_what_is_chosen_must_be_there(comparison: Comparison):
    with pytest.raises(ConfigurationError, match=r"--arms tbop: is no arm of trial; did you mean 'tbpo'\?"):
        choose(comparison, ["tbop"], [])
    with pytest.raises(ConfigurationError, match="--seeds 2: is no seed of trial; known: 0, 1"):
        choose(comparison, [], ["2"])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("baseline =", "base_line =", "base_line = 'plain': unknown key; did you mean 'baseline'?"),
        ('baseline = "plain"', 'baseline = "plian"', "baseline = 'plian' is no arm; did you mean 'plain'?"),
        ("window = 2", "window = 0", "window = 0: must be greater"),
        ("seeds = [0, 1]", "seeds = [1, 1]", "seeds are different whole numbers"),
        ("[arms.tbpo]", '[arms."a/b"]', "arms.a/b: an arm's name is a folder's"),
        ("[arms.tbpo]", "[arms.tbpo]\nseed = 3", "arms.tbpo.seed: seeds are the experiment's; set `seeds`"),
        ("[arms.tbpo]", "[arms.tbpo]\ntitle = 3", "arms.tbpo.title must be text"),
        ("learner.lr =", "learner.lrr =", "table [arms.tbpo] of {path}: learner.lrr = 0.0001: unknown key"),
        ("pass@1", "pass@4", "eval/held_out/pass@4: arm 'plain' will not measure it; known: eval/held_out/pass@1, "),
        ('"grpo"', '"grp0"', "table [arms.plain] of {path}: objective: unknown type 'grp0'; did you mean 'grpo'?"),
    ],
)
def test_a_mistake_is_named_with_its_place(experiment: Path, old: str, new: str, reason: str):
    assert reason.format(path=experiment) in refusal(experiment, old, new)


def test_every_arm_is_checked_and_a_mistake_of_all_is_said_once(experiment: Path):
    said = refusal(experiment, "steps = 3", "stepps = 3", is_short=True)
    assert said.startswith(f"table [short] of {experiment}: stepps = 3: unknown key; did you mean 'steps'?")
    assert "\n" not in said
    both = refusal(experiment, "learner.lr = 1e-4", "learner.lr = -1.0\nsteps = 0").split("\n")
    assert ["learner.lr" in line or "steps" in line for line in both] == [True, True]


def test_short_needs_its_table(experiment: Path):
    assert "has no [short] table" in refusal(experiment, "[short]\nseeds = [7]\nsteps = 3", "", is_short=True)
    assert "short.seeds = 7: must be a list" in refusal(experiment, "seeds = [7]", "seeds = 7", is_short=True)
