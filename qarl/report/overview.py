"""The head of a page: how each run went, in what their recipes differ, and the recipes themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from markupsafe import Markup

from qarl.recipe import to_toml
from qarl.report.figures import shown, table
from qarl.report.history import History
from qarl.report.page import Section
from qarl.run import measured_alignment, pass_at_1
from qarl.tracking.console import with_interval

MOST_WARNINGS = 20


def overview(histories: Sequence[History]) -> list[Section]:
    """How the runs went, and of several what is different in their recipes."""
    facts = {one.name: _facts(one) for one in histories}
    # A column a run: on a phone, one run is seen whole.
    rows = [
        {"run": fact, **{name: found[fact] for name, found in facts.items()}} for fact in next(iter(facts.values()))
    ]
    sections = [Section("Runs", table(rows) + _notes(histories))]
    differing = differences({one.name: one.recipe.model_dump(mode="json") for one in histories})
    if len(histories) > 1:
        html = table(differing) if differing else Markup("<p>The recipes have equal values in all keys.</p>")
        sections.append(Section("What differs in their recipes", html))
    return sections


def recipes(histories: Sequence[History]) -> Section:
    """Every recipe with all its keys, folded away."""
    folded = [
        Markup("<details><summary>{}</summary><pre>{}</pre></details>").format(one.name, to_toml(one.recipe))
        for one in histories
    ]
    return Section("Recipes", Markup("\n").join(folded), "As resolved, defaults included.")


def differences(recipes: Mapping[str, Mapping[str, Any]]) -> list[dict[str, object]]:
    """A row for every dotted key that has not the same value everywhere: the key, then each recipe's value."""
    flat = {name: _flat(recipe, "") for name, recipe in recipes.items()}
    keys = dict.fromkeys(key for one in flat.values() for key in one)
    return [
        {"key": key, **{name: _value(one, key) for name, one in flat.items()}}
        for key in keys
        if any(one.get(key) != next(iter(flat.values())).get(key) for one in flat.values())
    ]


def state_of(history: History) -> str:
    """`finished`, `running` or `stopped`, with the reason where one is known."""
    if history.is_finished:
        return "finished"
    if history.is_running:
        return "running"
    return f"stopped: {history.reason}" if history.reason else "stopped: run.log gives no reason, as after a kill"


def _facts(history: History) -> dict[str, object]:
    recipe, steps = history.recipe, history.steps
    seconds = [row["time/step"] for row in steps if row.get("time/step") is not None]
    return {
        "state": state_of(history),
        "steps": f"{history.done} of {recipe.steps}",
        "reward, first and last step": _change(steps[0].get("reward/mean"), steps[-1].get("reward/mean")),
        "held-out pass@1": _held_out(history),
        "alignment measured": measured_alignment(steps),
        "time a step": f"{shown(sum(seconds) / len(seconds))} s" if seconds else None,
        "time in steps": _duration(sum(seconds)) if seconds else None,
        "model": recipe.model,
        "scheme": recipe.scheme,
        "alignment": recipe.alignment,
        "objective": recipe.objective.type,
        "engine": recipe.engine.type,
        "seed": str(recipe.seed),
        "folder": str(history.folder.path),
    }


def _change(first: float | None, last: float | None) -> str:
    return f"{shown(first)} → {shown(last)}"


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else str(timedelta(seconds=int(seconds)))


def _held_out(history: History) -> str | None:
    """The first and the last figure with their intervals; one alone of a run that was not measured again."""
    if history.recipe.eval is None:
        return None
    name = pass_at_1(history.recipe.eval.name)
    measured = [
        f"{row[name]:.3f}{with_interval(row, name)}" for row in history.evaluations if row.get(name) is not None
    ]
    if len(measured) == 1:
        return f"{measured[0]} → not measured yet"
    return f"{measured[0]} → {measured[-1]}" if measured else None


def _notes(histories: Sequence[History]) -> Markup:
    """Damage, and what the runs warned of."""
    damage = [sentence for one in histories for sentence in one.damage]
    notes = [Markup('<p class="note">{}</p>').format(sentence) for sentence in damage]
    for one in histories:
        if one.warnings:
            told = [Markup("<li>{}</li>").format(text) for text in one.warnings[-MOST_WARNINGS:]]
            count = len(one.warnings)
            last = f", the last {MOST_WARNINGS}" if count > MOST_WARNINGS else ""
            notes.append(
                Markup("<details><summary>{}: {} in run.log{}</summary><ul>{}</ul></details>").format(
                    one.name, f"{count} warnings" if count > 1 else "1 warning", last, Markup("").join(told)
                )
            )
    return Markup("\n").join(notes)


def _flat(value: Any, key: str) -> dict[str, Any]:
    """A tree's leaves by dotted keys; tables of a list are counted from 0, as overrides count them."""
    if isinstance(value, Mapping) and value:
        pairs = [(f"{key}.{name}".removeprefix("."), one) for name, one in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        pairs = [(f"{key}.{place}", one) for place, one in enumerate(value)]
    else:
        return {key: value}
    return {name: leaf for inner, one in pairs for name, leaf in _flat(one, inner).items()}


def _value(flat: Mapping[str, Any], key: str) -> str | None:
    """As the recipe has it, all text: numbers beside words are read better from the left."""
    return None if flat.get(key) is None else str(flat[key])
