"""Whole recipes of options drawn at random: whatever goes together, what is aligned is so to the bit."""

import math
import random
from collections.abc import Mapping
from typing import Any

import pytest

from qarl.build import build
from qarl.errors import ConfigurationError
from qarl.metrics import values
from qarl.objectives.corrections import CORRECTIONS
from qarl.recipe import Recipe, parse_recipe

OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "scheme": (
        "none",
        "w8a8-int8",
        "w4a8-int8",
        "w4a16",
        "w4a16-g32",
        "w4a16-g16",
        "w3a16",
        "w2a16",
        "fp8",
        "fp8-block",
        "w12a12-int12",
    ),
    "alignment": ("auto", "auto", "none"),
    "group_size": (2, 3),
    "head": (None, None, "none", "w8a8-int8", "fp8"),
    "engine.kv_cache": ("fp32", "int8"),
    "engine.max_concurrency": (1, 3, 64),
    "engine.prefill_tokens": (1, 50, 512),
    "sampling.temperature": (0.3, 1.0, 2.0),
    "sampling.max_new_tokens": (1, 4, 16),
    "sampling.max_rounds": (1, 2),
    "learner.updates_per_batch": (1, 2),
    "learner.micro_batch_tokens": (1, 100, 1024),
    "learner.head_chunk_tokens": (1, 256),
    "learner.skip_equal_groups": ("auto", False),
    "learner.activation_checkpointing": (True, False),
    "quant.update_aware": (1.0, 1.0, 1.5),
    "learner.gradients": ("auto", "fp32"),
    "learner.optimizer.type": ("adamw", "muon"),
    "learner.lora.rank": (None, None, 2, 16),
    "objective.type": ("tbpo", "grpo", "dr_grpo", "dapo", "gspo", "cispo", "dual_clip", "positive_only", "acr"),
    "objective.kl.type": (None, None, "k1", "k2", "k3"),
    "objective.entropy_coef": (0.0, 0.0, 0.01),
    "objective.correction.type": (None, *CORRECTIONS),
    "advantage.type": ("group_std", "group_mean", "leave_one_out", "batch_normalized"),
}

RECIPES = 24


def drawn(seed: int) -> Recipe:
    """A valid recipe of random options; corrections only where the objective takes one."""
    choose = random.Random(seed)
    table: dict[str, Any] = {
        "model": "tiny",
        "seed": seed,
        "steps": 2,
        "prompts_per_step": 2,
        "prompts": {"type": "arithmetic"},
        "rewards": [{"type": "repetition", "ngram": 1}, {"type": "length", "token_cost": 0.01}],
    }
    for key, options in OPTIONS.items():
        value = choose.choice(options)
        if value is None or (key == "objective.correction.type" and table["objective"]["type"] in ("tbpo", "acr")):
            continue
        if key == "quant.update_aware" and table["scheme"] == "none":
            continue  # refused: there are no codes to move
        if key == "head":
            table["quant"] = {"rules": {"lm_head": value}}
            continue
        *path, leaf = key.split(".")
        owner = table
        for name in path:
            owner = owner.setdefault(name, {})
        owner[leaf] = value
    table["learner"]["lr"] = 1e-3
    if "kl" in table["objective"]:
        table["objective"]["kl"]["coef"] = 0.05
    return parse_recipe(table, f"recipe {seed}")


def valid_recipes() -> list[Recipe]:
    found: list[Recipe] = []
    seed = 0
    while len(found) < RECIPES:
        seed += 1
        assert seed < 100 * RECIPES, "hardly any is valid"
        try:
            found.append(drawn(seed))
        except ConfigurationError:
            continue
    return found


@pytest.mark.parametrize("recipe", valid_recipes(), ids=lambda recipe: f"{recipe.seed}-{recipe.scheme}")
def test_two_steps_of_any_recipe_are_finite_and_exact_where_aligned(recipe: Recipe) -> None:
    system = build(recipe)
    cast = system.cast
    cast.engine.load(cast.learner.publish())
    for step in range(recipe.steps):
        prompts = cast.prompts.take(step, recipe.prompts_per_step)
        groups = cast.engine.generate(prompts, recipe.group_size, system.plan.sampling, (recipe.seed, step))
        rewards = cast.reward(groups)
        found = values(cast.learner.update(groups, cast.advantage([one.total for one in rewards])))
        cast.engine.load(cast.learner.publish())
        if recipe.alignment == "auto":
            assert found["mismatch/bit_equal"] == 1.0
        assert [name for name, x in found.items() if not math.isfinite(x) and name != "quant/codes_flipped"] == []
        assert found["optim/skipped"] == 0.0
