"""Which rank makes which completion changes none of them."""

from __future__ import annotations

from typing import Any

import pytest

from qarl.cluster.crew import Crew
from qarl.cluster.leader import own_completions, part_of
from qarl.records import Completion, Group, Prompt, Sampling
from qarl.rollout.native import unstarted

TOML = """
model = "tiny"
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
    from qarl.recipe import parse_recipe

    if crew is not None and not crew.leads:
        return build_follower(TOML, crew).obey()
    import tomllib

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
