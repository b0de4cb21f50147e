"""What weights a run left, and that adapters are not put on another base."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qarl.build import build
from qarl.checkpoint import CheckpointStore
from qarl.errors import ConfigurationError
from qarl.models.names import TINY_CONFIG, load_model, random_weights
from qarl.models.save import save_folder
from qarl.models.tokenizer import byte_tokenizer
from qarl.recipe import load_recipe, to_toml
from qarl.run import FORMAT
from qarl.runfolder import RunFolder
from qarl.trained import adapters_at, model_named, tokenizer_of

SMOKE = Path(__file__).resolve().parents[1] / "recipes" / "smoke.toml"
LORA = ("--learner.lora.rank=4", "--learner.lora.alpha=6")
UP = "model.layers.1.mlp.up_proj"


def run_of(folder: Path, *overrides: str) -> tuple[Path, dict[str, Tensor]]:
    """A run with one checkpoint, and what it trained, which was moved a little."""
    recipe = load_recipe(SMOKE, overrides)
    folder.mkdir()
    (folder / "recipe.toml").write_text(to_toml(recipe))
    learner = build(recipe).cast.learner
    with torch.no_grad():
        for tensor in learner.trained().values():
            tensor.add_(0.01 * torch.randn_like(tensor))
    learner._snapshot = learner._requantize()
    CheckpointStore(folder / "checkpoints").save(3, learner.save, {"format": FORMAT, "version": 3, "prompts": ""})
    return folder, {name: tensor.detach().clone() for name, tensor in learner.trained().items()}


def base_folder(path: Path, seed: int) -> str:
    save_folder(path, TINY_CONFIG, random_weights(TINY_CONFIG, seed), byte_tokenizer())
    return str(path)


def test_a_run_of_all_weights_holds_its_model(tmp_path: Path) -> None:
    run, weights = run_of(tmp_path / "run")
    assert adapters_at(run) is None
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model_named(str(run)).tensors.items())


def test_adapters_are_merged_into_the_base_that_the_runs_recipe_names(tmp_path: Path) -> None:
    run, adapters = run_of(tmp_path / "run", *LORA)
    base, found = load_model("tiny"), model_named(str(run / "checkpoints" / "step-3"))
    a, b = (adapters[f"base_model.model.{UP}.lora_{part}.weight"] for part in "AB")
    torch.testing.assert_close(found.tensors[f"{UP}.weight"], base.tensors[f"{UP}.weight"] + 1.5 * b @ a)
    assert torch.equal(found.tensors["model.norm.weight"], base.tensors["model.norm.weight"])
    trained = adapters_at(run)
    assert trained is not None and (trained.rank, trained.alpha, trained.recipe.model) == (4, 6.0, "tiny")
    assert all(torch.equal(trained.tensors[name], tensor) for name, tensor in adapters.items())


def test_a_run_may_begin_with_another_runs_adapters_merged(tmp_path: Path) -> None:
    first, _ = run_of(tmp_path / "first", *LORA)
    second, _ = run_of(tmp_path / "second", f"--model={first}", *LORA)
    trained = adapters_at(second)
    assert trained is not None
    merged = model_named(str(first)).tensors
    assert all(torch.equal(trained.base.tensors[name], tensor) for name, tensor in merged.items())


def test_adapters_are_not_put_on_a_base_that_has_changed(tmp_path: Path) -> None:
    base = base_folder(tmp_path / "base", seed=1)
    run, _ = run_of(tmp_path / "run", f"--model={base}", *LORA)
    assert model_named(str(run)).name == str(run)
    for file in (tmp_path / "base").iterdir():
        file.unlink()
    base_folder(tmp_path / "base", seed=2)
    with pytest.raises(ConfigurationError, match=r"adapters belong to other weights than model = '.*base' has now"):
        model_named(str(run))


def test_a_runs_tokenizer_is_its_own_or_that_of_its_recipes_model(tmp_path: Path) -> None:
    first, _ = run_of(tmp_path / "first", *LORA)
    second, _ = run_of(tmp_path / "second", f"--model={first}", *LORA)
    vocabulary = byte_tokenizer().get_vocab()
    assert tokenizer_of(RunFolder(second)).get_vocab() == vocabulary
    whole, _ = run_of(tmp_path / "whole", f"--model={base_folder(tmp_path / 'base', seed=1)}")
    shutil.rmtree(tmp_path / "base")
    assert tokenizer_of(RunFolder(whole)).get_vocab() == vocabulary
    shutil.rmtree(whole / "checkpoints")
    with pytest.raises(ConfigurationError, match="base' is no model"):
        tokenizer_of(RunFolder(whole))
