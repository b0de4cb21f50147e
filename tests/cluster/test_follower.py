"""A follower serves and does what the leader says, and refuses what is not the leader's."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qarl.build import build, build_follower
from qarl.cluster.crew import STOP, Crew, Fault
from qarl.cluster.follower import Follower
from qarl.errors import RunError
from qarl.recipe import parse_recipe
from tests.cluster.test_leader import TOML


class Told:
    """A crew of one follower that has these orders."""

    rank, count = 1, 2

    def __init__(self, *orders: tuple[str, tuple[Any, ...]]) -> None:
        self.orders = [*orders, (STOP, ())]
        self.answers: list[Any] = []

    def next_order(self) -> tuple[str, tuple[Any, ...]]:
        return self.orders.pop(0)

    def answer(self, found: Any) -> None:
        self.answers.append(found)

    def is_called_off(self) -> bool:
        return False


def test_it_serves_its_own_weights_if_they_are_the_leaders(small) -> None:
    learner = small.learner("w8a8-int8")
    snapshot = learner.publish()
    crew = Told(("load", (snapshot.version, snapshot.checksum)), ("load", (snapshot.version, "other")))
    engine = small.engine()
    Follower(crew, engine, learner).obey()
    assert engine.version == snapshot.version
    served, refused = crew.answers
    assert served is None
    assert isinstance(refused, Fault) and refused.words.startswith("rank 1 published other weights than the leader")


def test_an_error_of_a_run_is_an_answer_and_a_bug_is_not() -> None:
    def fail(*arguments: object) -> None:
        raise arguments[0]

    learner = SimpleNamespace(update=fail)
    crew = Told(("update", (RunError("stale"), [])), ("update", (KeyError("bug"), [])))
    with pytest.raises(KeyError, match="bug"):
        Follower(crew, None, learner).obey()
    assert crew.answers == [Fault("RunError", "stale")]


def differing(crew: Crew) -> Any:
    """A token of the follower's has another log-probability than its learner finds."""
    if not crew.leads:
        return build_follower(TOML, crew).obey()
    system = build(parse_recipe(tomllib.loads(TOML), "test"), None, crew)
    cast = system.cast
    cast.engine.load(cast.learner.publish())
    groups = cast.engine.generate(cast.prompts.take(0, 3), 3, system.plan.sampling, (0, 0))
    groups[-1].completions[-1].engine_logprobs[0] += 0.5
    try:
        cast.learner.update(groups, [torch.tensor([1.0, -1.0, 0.5])] * 3)
        words = "nothing"
    except RunError as error:
        words = str(error)
    again = cast.engine.generate(cast.prompts.take(0, 3), 3, system.plan.sampling, (0, 0))
    crew.dismiss()
    return words, groups[-1].prompt.id, cast.learner.optimizer_steps, len(again)


def test_a_bit_that_differs_on_a_follower_is_the_leaders_error_and_nothing_was_trained(pair) -> None:
    words, prompt, steps, groups = pair(differing)[0]
    assert "engine and learner promise equal log-probabilities" in words and f"the first of them {prompt};" in words
    assert (steps, groups) == (0, 3)


def restored(crew: Crew, folder: str) -> Any:
    """A learner of two ranks is saved, trained no further, and restored into another one."""
    if not crew.leads:
        return build_follower(TOML, crew).obey()
    system = build(parse_recipe(tomllib.loads(TOML), "test"), None, crew)
    cast, plan = system.cast, system.plan
    cast.engine.load(cast.learner.publish())
    groups = cast.engine.generate(cast.prompts.take(0, 3), 3, plan.sampling, (0, 0))
    metrics = cast.learner.update(groups, [torch.tensor([1.0, -1.0, 0.5])] * 3)
    saved = Path(folder) / "saved"
    saved.mkdir()
    cast.learner.save(saved)
    published = cast.learner.publish().checksum
    cast.learner.restore(saved)
    crew.dismiss()
    return published, cast.learner.publish().checksum, cast.learner.version, metrics["mismatch/bit_equal"].value()


def test_what_a_crew_saved_it_restores(pair, tmp_path) -> None:
    published, again, version, bit_equal = pair(restored, str(tmp_path))[0]
    assert again == published
    assert (version, bit_equal) == (1, 1.0)
