"""The main loop: rollout, rewards, advantages, update, publish. It knows roles and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from qarl.interrupts import Interrupts
from qarl.metrics import Last, Metrics, merge, values
from qarl.readings import completion_metrics, is_unequal, num_tokens, prompt_metrics, reward_metrics
from qarl.records import Group, GroupRewards, Sampling
from qarl.roles import Advantage, Engine, Learner, Observer, PromptSource, Reward


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """Who plays each role of a run."""

    prompts: PromptSource
    engine: Engine
    reward: Reward
    advantage: Advantage
    learner: Learner


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is done in a run, and from which seed; `max_rounds` is that of `collect`."""

    seed: int
    steps: int
    prompts_per_step: int
    group_size: int
    sampling: Sampling
    max_rounds: int = 1

    def rounds_of(self, step: int) -> range:
        """The indices of a step's rounds among those of all steps: what prompts are taken by."""
        return range(step * self.max_rounds, (step + 1) * self.max_rounds)


@dataclass(slots=True, eq=False)
class Batch:
    """What a step sampled, and of that what it trains on."""

    groups: list[Group] = field(default_factory=list)
    rewards: list[GroupRewards] = field(default_factory=list)
    of_engine: Metrics = field(default_factory=dict)
    rounds: int = 0
    skipped: int = 0

    def add(self, groups: Sequence[Group], rewards: Sequence[GroupRewards], of_engine: Metrics) -> None:
        self.groups += groups
        self.rewards += rewards
        self.of_engine = merge([self.of_engine, of_engine])
        self.rounds += 1

    def told(self, chosen: Sequence[int]) -> list[GroupRewards]:
        """The rewards, with a note of which groups are trained on."""
        return [replace(one, is_trained=index in chosen) for index, one in enumerate(self.rewards)]

    def trained(self, count: int) -> list[int]:
        """Indices of the first `count` groups that can teach, in order; where there are too few, of others too, so that
        an update has the same number of prompts in every step. Without KL and entropy terms these change no gradient.
        """
        able = [index for index, rewards in enumerate(self.rewards) if is_unequal(rewards)][:count]
        others = [index for index in range(len(self.groups)) if index not in able]
        others.sort(key=lambda index: bool(self.rewards[index].total.isnan().all()))  # those without any reward last
        return sorted(able + others[: count - len(able)])


def train(
    cast: Cast,
    plan: Plan,
    first_step: int,
    observer: Observer,
    interrupts: Interrupts,
) -> None:
    """Run steps `first_step` to `plan.steps`; step k rolls out weight version k and publishes version k + 1.

    Signals raise `Interrupted` only before the update: what a step trained is never lost or half done.
    """
    for step in range(first_step, plan.steps):
        with interrupts.allowed():
            measured = observer.before_step(step)
            clock = Stopwatch()
            batch = collect(cast, plan, step, clock)
        chosen = batch.trained(plan.prompts_per_step)
        observer.after_rollout(step, batch.groups, batch.told(chosen))
        advantages = cast.advantage([batch.rewards[index].total for index in chosen])
        with clock.lap("learner"):
            learned = cast.learner.update([batch.groups[index] for index in chosen], advantages)
        with clock.lap("publish"):
            cast.engine.load(cast.learner.publish())
        readings = measured | _rollout_metrics(batch, clock) | batch.of_engine | learned
        observer.after_step(step, values(readings | clock.metrics()))


def collect(cast: Cast, plan: Plan, step: int, clock: Stopwatch) -> Batch:
    """The step's completions and rewards: one round of `prompts_per_step` prompts, and up to `max_rounds` until as many
    groups have unequal rewards (dynamic sampling: DAPO, arXiv 2503.14476, section 3.2).
    """
    batch = Batch()
    for index, round_index in enumerate(plan.rounds_of(step)):
        skipped_before = cast.prompts.skipped
        with clock.lap("rollout"):
            prompts = cast.prompts.take(round_index, plan.prompts_per_step)
            seed = (plan.seed, step, index) if index else (plan.seed, step)
            groups = cast.engine.generate(prompts, plan.group_size, plan.sampling, seed=seed)
        with clock.lap("reward"):
            batch.add(groups, cast.reward(groups), cast.engine.metrics())
        batch.skipped += cast.prompts.skipped - skipped_before
        if sum(map(is_unequal, batch.rewards)) >= plan.prompts_per_step:
            break
    return batch


class Stopwatch:
    """Seconds of each part of a step."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def lap(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - start

    def metrics(self) -> Metrics:
        """`time/<part>` and `time/step`, which also holds what lies between the parts."""
        parts = self.seconds | {"step": time.perf_counter() - self._start}
        return {f"time/{part}": Last(seconds) for part, seconds in parts.items()}


def _rollout_metrics(batch: Batch, clock: Stopwatch) -> Metrics:
    """Of everything sampled, so that dynamic sampling does not make the policy look better or worse than it is."""
    speed = num_tokens(batch.groups) / clock.seconds["rollout"]
    of_rollout: Metrics = {"perf/rollout_tokens_per_s": Last(speed), "perf/rollout_rounds": Last(batch.rounds)}
    of_prompts = prompt_metrics([group.prompt for group in batch.groups], batch.skipped)
    return reward_metrics(batch.rewards) | completion_metrics(batch.groups) | of_prompts | of_rollout
