"""`qarl eval`: held-out questions for a model or for the newest checkpoint of a run."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qarl.build import System, build, eval_set
from qarl.errors import ConfigurationError
from qarl.evaluate import EvalSet, evaluate
from qarl.explain import did_you_mean
from qarl.metrics import values
from qarl.prompts import SOURCES, File, FinitePrompts, SourceConfig, describe_prompt
from qarl.prompts.files import FileRows
from qarl.recipe import Override, Recipe, parse_overrides, parse_recipe
from qarl.rollout.request import Progress
from qarl.run import EVALUATION_STEP
from qarl.runfolder import checkpoint_at, run_at

DEFAULT_COUNT = 200


def assess(
    model: str,
    prompts: str | None,
    samples: int | None,
    count: int | None,
    temperature: float | None,
    overrides: Sequence[str],
    progress: Progress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Ask `count` questions `samples` times each and return the metrics, with the model, scheme and version asked.

    `model` is a run folder, a checkpoint of a run, or whatever a recipe's `model` may be; `prompts` is a file or the
    name of a source, and for a run may be left out. Overrides are those of a recipe. What is None is as the run has
    it in `[eval]`, or else one answer at temperature 1; a file's questions are all asked. `say` is told the first
    question as it is asked. A figure that is not a number is None.
    """
    checkpoint = None if run_at(Path(model)) is None else checkpoint_at(Path(model))
    changes = parse_overrides(overrides)
    recipe = assessment_recipe(model, prompts, samples, count, temperature, changes)
    is_file = prompts is not None and recipe.prompts.type == "file"
    # Nothing is trained on, so there need not be a batch of it; and nothing of a file need be held out.
    unused: dict[str, Any] = {"prompts_per_step": 1} | ({"eval": None} if is_file else {})
    system = build(recipe.model_copy(update=unused), progress)
    asks_all = count is None and all(change.key != "eval.count" for change in changes)
    questions = _questions_of_file(recipe, system, asks_all) if is_file else system.questions
    assert questions is not None
    for warning in system.warnings:
        say(warning)
    say(f"{len(questions.prompts)} questions; the first one, {describe_prompt(questions.prompts[0])}")
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
        **{name: value if math.isfinite(value) else None for name, value in values(measured).items()},
    }


def assessment_recipe(
    model: str,
    prompts: str | None,
    samples: int | None,
    count: int | None,
    temperature: float | None,
    overrides: Sequence[Override],
) -> Recipe:
    """The recipe of a run, or one made for a bare model, with these questions in place of its own.

    A run's questions are put as in its training (system message, chat template, length), whatever they are.
    """
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
        own_form = {key: value for key, value in table.get("prompts", {}).items() if key in SourceConfig.model_fields}
        # A resolved recipe lacks the system message only where there was none, whatever another source's default is.
        form = {"system": None} | own_form if run is not None else {}
        table["prompts"] = form | questions_table(prompts)
    if "rewards" not in table:
        scorer = "reasoning_gym" if table["prompts"]["type"] == "reasoning_gym" else "answer"
        table["rewards"] = [{"type": scorer}]
    own = table.get("eval", {})
    if count is None and prompts is None:
        count = own.get("count")
    elif count is None and prompts not in SOURCES:
        count = num_rows(table["prompts"])
    table["eval"] = {
        "name": re.sub(r"[^\w.-]", "_", Path(table["prompts"].get("path", table["prompts"]["type"])).stem),
        "count": DEFAULT_COUNT if count is None else count,
        "samples": own.get("samples", 1) if samples is None else samples,
        "temperature": own.get("temperature", 1.0) if temperature is None else temperature,
        # What counts as right stays what the run says. When it saves and rates checkpoints is of no use here.
        **{key: own[key] for key in ("correct_term",) if key in own},
    }
    table.pop("checkpoint", None)
    return parse_recipe(table, "command line", overrides)


def _questions_of_file(recipe: Recipe, system: System, asks_all: bool) -> EvalSet:
    """The rows of a file that is named for this purpose: all that are short enough, or as many as are asked for."""
    assert recipe.eval is not None
    source = system.cast.prompts
    assert isinstance(source, FinitePrompts)
    count = source.num_training if asks_all else recipe.eval.count
    return eval_set(recipe, source.take(0, count), system.plan.sampling)


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
