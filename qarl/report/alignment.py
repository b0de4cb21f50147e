"""How far engine and learner are apart with a run's newest weights, layer by layer: what `qarl align` measures."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from qarl.align import align
from qarl.quant import QuantConfig
from qarl.recipe import Recipe
from qarl.report.figures import table
from qarl.report.history import History
from qarl.report.page import Section
from qarl.rollout.request import Progress

TITLE = "Alignment by layer"


def alignment(histories: Sequence[History], tokens: int, progress: Progress | None = None) -> Section:
    """Measure every run's newest checkpoint over at least `tokens` tokens; with 0 say how to have it measured."""
    if not tokens:
        return Section(TITLE, "", "Not measured for this page: `qarl report ... --align 1000` does it for every run.")
    pieces = [_measured(one, tokens, progress) for one in histories]
    note = "Of each run's newest checkpoint, over new tokens sampled by its engine and scored by its learner."
    return Section(TITLE, Markup("\n").join(pieces), note)


def _measured(history: History, tokens: int, progress: Progress | None) -> Markup:
    recipe = history.recipe
    found = align(str(history.folder.path), recipe.scheme, tokens, _engine(recipe), recipe.alignment, progress)
    layers = found.pop("per_layer")
    exceptions = (
        Markup("")
        if recipe.quant == QuantConfig()
        else Markup('<p class="note">Without the exceptions of [quant].</p>')
    )
    return Markup("<h3>{}</h3>{}{}{}").format(history.name, exceptions, table([found]), table(layers))


def _engine(recipe: Recipe) -> dict[str, object]:
    """The keys of the run's engine that change what it computes."""
    return recipe.engine.model_dump(mode="json", include={"type", "kv_cache", "dtype"})
