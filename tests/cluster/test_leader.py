"""Which rank makes which completion changes none of them."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from typing import Any

import pytest
import torch

from qarl.cluster.crew import Crew
from qarl.cluster.leader import own_completions, part_of
from qarl.errors import RunError
from qarl.models.names import load_model
from qarl.recipe import parse_recipe
from qarl.records import Completion, Group, Prompt, Sampling, Snapshot
from qarl.rollout.config import NativeEngineConfig
from qarl.rollout.native import NativeEngine
from qarl.rollout.request import unstarted

TOML = """
model = "tiny"
device = "cpu"
steps = 9
prompts_per_step = 3
group_size = 3
scheme = "w8a8-int8"
prompts.type = "arithmetic"
rewards = [{type = "repetition", ngram = 1}]
sampling.max_new_tokens = 6
learner.lr = 1e-3
"""


def prompts(*names: str) -> list[Prompt]:
    return [Prompt(name, (5, 6, 7), "text", {"answer": name}) for name in names]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_completion_has_one_rank(ranks: int) -> None:
    groups = unstarted(prompts("a", "b", "a"), 2)
    parts = [part_of(groups, rank, ranks) for rank in range(ranks)]
    sizes = [len(own_completions(part, part)) for part in parts]
    assert sum(sizes) == 6 and max(sizes) - min(sizes) <= 1


def test_a_rank_is_told_of_groups_that_count_for_its_seeds_and_of_no_others() -> None:
    groups = unstarted(prompts("a", "b", "a"), 2)
    last = part_of(groups, 2, 3)
    assert [group.prompt.id for group in last] == ["a", "a"]
    assert [[c.finish_reason for c in group.completions] for group in last] == [["stop"] * 2, ["aborted"] * 2]
    assert [group.prompt.id for group in part_of(groups, 1, 3)] == ["b"]


def tokens(groups: list[Group]) -> list[list[list[int]]]:
    return [[completion.token_ids.tolist() for completion in group.completions] for group in groups]


def rolled_out(crew: Crew | None, names: tuple[str, ...], group_size: int) -> Any:
    from qarl.build import build, build_follower

    if crew is not None and not crew.leads:
        return build_follower(TOML, crew).obey()
    system = build(parse_recipe(tomllib.loads(TOML), "test"), None, crew)
    engine = system.cast.engine
    engine.load(system.cast.learner.publish())
    groups = engine.generate(prompts(*names), group_size, Sampling(1.0, 6, (0,)), (3, 1))
    if crew is not None:
        crew.dismiss()
    first = groups[0].completions[0]
    assert isinstance(first, Completion)
    return tokens(groups), [group.prompt.row for group in groups], engine.version, "perf/bubble" in engine.metrics()


@pytest.mark.parametrize("names", [("a", "b", "c"), ("a", "a", "b", "a")])
def test_all_ranks_together_sample_what_one_process_does(pair, names: tuple[str, ...]) -> None:
    assert pair(rolled_out, names, 3)[0] == rolled_out(None, names, 3)


def stopped(crew: Crew) -> Any:
    """Completions of a rollout that the leader's third step ends, and of a whole one."""
    from qarl.build import build, build_follower

    if not crew.leads:
        return build_follower(TOML, crew).obey()
    cast = build(parse_recipe(tomllib.loads(TOML), "test"), None, crew).cast
    cast.engine.load(cast.learner.publish())
    asked: list[tuple[int, int]] = []

    def stop(finished: int, total: int) -> bool:
        asked.append((finished, total))
        return len(asked) == 3

    question = (prompts("a", "b", "c"), 3, Sampling(1.0, 1000), (3, 1))
    part, whole = cast.engine.generate(*question, stop), cast.engine.generate(*question)
    crew.dismiss()
    return part, whole, asked


def test_the_leader_stops_all_ranks_which_hand_back_what_they_have(pair) -> None:
    part, whole, asked = pair(stopped)[0]
    assert asked == [(0, 9)] * 3
    for one, other in zip(part, whole, strict=True):
        for begun, done in zip(one.completions, other.completions, strict=True):
            assert (begun.finish_reason, done.finish_reason) == ("aborted", "length")
            assert len(begun) < 1000 and torch.equal(begun.token_ids, done.token_ids[: len(begun)])


ELSEWHERE = (
    TOML
    + """
engine.type = "vllm"
engine.dtype = "float32"
objective.type = "grpo"
"""
)


class Elsewhere:
    """An engine that computes as ours does, and is none of ours; it looks at weights when it needs them."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self.metrics = engine.metrics

    def load(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.version = snapshot.version

    def generate(self, *asked: Any) -> list[Group]:
        self._engine.load(self._snapshot)
        return self._engine.generate(*asked)


def trained_elsewhere(crew: Crew) -> Any:
    """One step whose completions come from the leader's engine alone."""
    from qarl import build

    if not crew.leads:
        return build.build_follower(ELSEWHERE, crew).obey()
    recipe = parse_recipe(tomllib.loads(ELSEWHERE), "test")
    model = load_model(recipe.model)
    engine = NativeEngine(NativeEngineConfig(), model.config, model.sampleable, str)
    schemes = build.scheme_plan(model, recipe.scheme, recipe.quant, recipe.engine)
    learner = build.local_learner(recipe, model, schemes, crew)
    cast = build.cast_of(None, Elsewhere(engine), None, recipe.advantage, learner, crew)
    cast.engine.load(cast.learner.publish())
    groups = cast.engine.generate(prompts("a", "b", "c"), 3, Sampling(1.0, 6, (0,)), (3, 1))
    metrics = cast.learner.update(groups, [torch.tensor([1.0, -1.0, 0.5])] * 3)
    cast.engine.load(cast.learner.publish())
    refused = replace(cast.learner.publish(), checksum="other")
    with pytest.raises(RunError, match="rank 1 published other weights than the leader"):
        cast.engine.load(refused)
    crew.dismiss()
    rows = [group.prompt.row for group in groups]
    return tokens(groups), rows, cast.engine.version, metrics["mismatch/max_abs"].value()


def test_an_engine_elsewhere_is_the_leaders_alone_and_serves_what_all_ranks_published(pair) -> None:
    found, rows, version, mismatch = pair(trained_elsewhere)[0]
    assert version == 1 and [len(group) for group in found] == [3, 3, 3]
    assert rows == [{"answer": name} for name in "abc"]
    assert mismatch < 1e-4
