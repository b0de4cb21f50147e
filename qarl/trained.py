"""The weights that a run left: a model of its own, or adapters and the base that they belong to."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from qarl.errors import ConfigurationError
from qarl.models.lora import merged
from qarl.models.names import LoadedModel, load_model, tokenizer_named
from qarl.models.tokenizer import load_tokenizer
from qarl.recipe import Recipe, load_recipe
from qarl.runfolder import RunFolder, checkpoint_at, run_at
from qarl.sync.adapters import read_peft
from qarl.sync.checksum import checksum

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ADAPTER = "adapter"
"""Where in a checkpoint adapters are, in place of `model`."""


@dataclass(frozen=True, slots=True, eq=False)
class TrainedAdapters:
    """Adapters by PEFT's names, the model that they were trained on, and the run's recipe."""

    tensors: dict[str, Tensor]
    rank: int
    alpha: float
    base: LoadedModel
    recipe: Recipe


def model_named(model: str) -> LoadedModel:
    """What a recipe's `model` names; for a run or a checkpoint the model it holds, adapters merged into their base."""
    if run_at(Path(model)) is None:
        return load_model(model)
    trained = adapters_at(Path(model))
    if trained is None:
        return load_model(str(checkpoint_at(Path(model)).folder / "model"))
    tensors = merged(trained.base.tensors, trained.tensors, trained.alpha / trained.rank)
    return replace(trained.base, name=model, tensors=tensors)


def tokenizer_of(run: RunFolder) -> PreTrainedTokenizerBase:
    """The tokenizer of a run, without weights: what a checkpoint has beside its model, else that of the recipe's model.

    ConfigurationError where neither is there any more.
    """
    saved = sorted(run.checkpoints.glob("step-*/model/tokenizer_config.json"))
    if saved:
        return load_tokenizer(saved[-1].parent)
    model = load_recipe(run.recipe).model
    earlier = run_at(Path(model))
    return tokenizer_named(model) if earlier is None else tokenizer_of(earlier)


def adapters_at(path: Path) -> TrainedAdapters | None:
    """The adapters of the run or checkpoint at `path`; None where there are none.

    ConfigurationError where the base is no longer the one that they were trained on.
    """
    run = run_at(path)
    if run is None or not ((folder := checkpoint_at(path).folder) / ADAPTER).is_dir():
        return None
    recipe = load_recipe(run.recipe)
    base = model_named(recipe.model)
    trained_on = json.loads((folder / "learner.json").read_text())["started_with"]
    if checksum(base.tensors) != trained_on:
        raise ConfigurationError(
            f"{folder}: its adapters belong to other weights than model = '{recipe.model}' has now; put the old ones "
            "back"
        )
    return TrainedAdapters(*read_peft(folder / ADAPTER), base, recipe)
