"""`qarl eval`: held-out questions for a model or for the newest checkpoint of a run."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.build import build, eval_set
from qarl.errors import ConfigurationError
from qarl.evaluate import evaluate
from qarl.explain import did_you_mean
from qarl.metrics import values
from qarl.prompts import SOURCES, File
from qarl.prompts.files import FileRows
from qarl.recipe import Override, Recipe, parse_overrides, parse_recipe
from qarl.rollout.native import Progress
from qarl.run import EVALUATION_STEP
from qarl.runfolder import checkpoint_at, run_at

DEFAULT_COUNT = 200


def assess(
    model: str,
    prompts: str | None,
    samples: int,
    count: int | None,
    temperature: float,
    overrides: Sequence[str],
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Ask `count` questions `samples` times each and return the metrics, with the model, scheme and version asked.

    `model` is a run folder, a checkpoint of a run, or whatever a recipe's `model` may be; `prompts` is a file or the
    name of a source, and for a run may be left out. Overrides are those of a recipe. A file's questions are all asked
    by default.
    """
    checkpoint = None if run_at(Path(model)) is None else checkpoint_at(Path(model))
    recipe = assessment_recipe(model, prompts, samples, count, temperature, parse_overrides(overrides))
    assert recipe.eval is not None
    if prompts is not None and recipe.prompts.type == "file":
        # All rows of a file that is named for this purpose are asked; to a source they are its training rows.
        system = build(recipe.model_copy(update={"eval": None}), progress)
        questions = eval_set(recipe.eval, system.cast.prompts.take(0, recipe.eval.count), system.plan.sampling)
    else:
        system = build(recipe, progress)
        assert system.questions is not None
        questions = system.questions
    learner, engine = system.cast.learner, system.cast.engine
    if checkpoint is not None:
        learner.restore(checkpoint.folder)
    engine.load(learner.publish())
    measured = evaluate(engine, system.cast.reward, questions, seed=(recipe.seed, EVALUATION_STEP))
    return {
        "model": model,
        "scheme": recipe.scheme,
        "version": engine.version,
        "checkpoint": None if checkpoint is None else str(checkpoint.folder),
        **values(measured),
    }


def assessment_recipe(
    model: str,
    prompts: str | None,
    samples: int,
    count: int | None,
    temperature: float,
    overrides: Sequence[Override],
) -> Recipe:
    """The recipe of a run, or one made for a bare model, with these questions in place of its own."""
    table: dict[str, Any] = {"model": model}
    run = run_at(Path(model))
    if run is not None:
        table = tomllib.loads(run.recipe.read_text(encoding="utf-8"))
    elif prompts is None:
        raise ConfigurationError(
            f"{model}: is no run folder (it has no recipe.toml), and of a bare model --prompts is required; give a "
            f"file or one of {', '.join(name for name in SOURCES if name != 'file')}"
        )
    if prompts is not None:
        table["prompts"] = questions_table(prompts)
    if "rewards" not in table:
        scorer = "reasoning_gym" if table["prompts"]["type"] == "reasoning_gym" else "answer"
        table["rewards"] = [{"type": scorer}]
    name = Path(table["prompts"].get("path", table["prompts"]["type"])).stem
    own = table.get("eval", {})
    if count is None and prompts is None:
        count = own.get("count")
    elif count is None and prompts not in SOURCES:
        count = num_rows(table["prompts"])
    asked = {"name": name, "count": count or DEFAULT_COUNT, "samples": samples, "temperature": temperature}
    # What counts as right stays what the run says. When it saves and rates checkpoints is of no use here.
    table["eval"] = asked | {key: own[key] for key in ("correct_term",) if key in own}
    table.pop("checkpoint", None)
    return parse_recipe(table, "command line", overrides)


def questions_table(prompts: str) -> dict[str, Any]:
    """`--prompts` as the recipe's table: the name of a source, or a file."""
    if prompts in SOURCES:
        return {"type": prompts}
    if Path(prompts).suffix:
        return {"type": "file", "path": prompts}
    raise ConfigurationError(f"--prompts {prompts}: no file and no source; {did_you_mean(prompts, list(SOURCES))}")


def num_rows(table: dict[str, Any]) -> int:
    """How many questions a file has."""
    config = File.model_validate(table)
    return len(FileRows(Path(config.path), config.prompt_column, config.answer_column))
