"""`qarl eval`: held-out questions for a model or for the newest checkpoint of a run."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qarl.build import build
from qarl.checkpoint import newest_checkpoint
from qarl.errors import ConfigurationError
from qarl.evaluate import evaluate
from qarl.explain import did_you_mean
from qarl.metrics import values
from qarl.prompts import SOURCES
from qarl.prompts.files import FileRows
from qarl.recipe import Override, Recipe, parse_overrides, parse_recipe
from qarl.rollout.native import Progress
from qarl.run import EVALUATION_STEP
from qarl.runfolder import RunFolder

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

    `model` is a run folder or whatever a recipe's `model` may be; `prompts` is a file or the name of a source, and
    for a run may be left out. Overrides are those of a recipe. A file's questions are all asked by default.
    """
    recipe = assessment_recipe(model, prompts, samples, count, temperature, parse_overrides(overrides))
    system = build(recipe, progress)
    learner, engine = system.cast.learner, system.cast.engine
    checkpoint = newest_checkpoint(RunFolder(Path(model)).checkpoints)
    if checkpoint is not None:
        learner.restore(checkpoint.folder)
    engine.load(learner.publish())
    assert system.questions is not None
    measured = evaluate(engine, system.cast.reward, system.questions, seed=(recipe.seed, EVALUATION_STEP))
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
    run = RunFolder(Path(model))
    if run.recipe.is_file():
        table = tomllib.loads(run.recipe.read_text(encoding="utf-8"))
    elif prompts is None:
        raise ConfigurationError(f"--prompts: is required for a model; give a file or one of {', '.join(SOURCES)}")
    if prompts is not None:
        table["prompts"] = questions_table(prompts)
    if "rewards" not in table:
        scorer = "reasoning_gym" if table["prompts"]["type"] == "reasoning_gym" else "answer"
        table["rewards"] = [{"type": scorer}]
    name = Path(table["prompts"].get("path", table["prompts"]["type"])).stem
    if count is None:
        count = _rows_of_file(table["prompts"]) or DEFAULT_COUNT
    table["eval"] = {"name": name, "count": count, "samples": samples, "temperature": temperature}
    return parse_recipe(table, f"qarl eval {model}", overrides)


def questions_table(prompts: str) -> dict[str, Any]:
    """`--prompts` as the recipe's table: the name of a source, or a file whose rows are all held out."""
    if prompts in SOURCES:
        return {"type": prompts}
    if Path(prompts).suffix:
        return {"type": "file", "path": prompts, "eval_path": prompts}
    raise ConfigurationError(f"--prompts {prompts}: no file and no source; {did_you_mean(prompts, list(SOURCES))}")


def _rows_of_file(prompts: dict[str, Any]) -> int | None:
    path = prompts.get("eval_path")
    if path is None:
        return None
    return len(FileRows(Path(path), prompts.get("prompt_column", "prompt"), prompts.get("answer_column")))
