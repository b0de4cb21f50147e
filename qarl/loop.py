"""The main loop: rollout, rewards, advantages, update, publish. It knows roles and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from qarl.interrupts import Interrupts
from qarl.metrics import Last, Metrics, values
from qarl.readings import completion_metrics, num_tokens, reward_metrics
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
    """How much is done in a run, and from which seed."""

    seed: int
    steps: int
    prompts_per_step: int
    group_size: int
    sampling: Sampling


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
            with clock.lap("rollout"):
                prompts = cast.prompts.take(step, plan.prompts_per_step)
                groups = cast.engine.generate(prompts, plan.group_size, plan.sampling, seed=(plan.seed, step))
            with clock.lap("reward"):
                rewards = cast.reward(groups)
        observer.after_rollout(step, groups, rewards)
        advantages = cast.advantage([group.total for group in rewards])
        with clock.lap("learner"):
            learned = cast.learner.update(groups, advantages)
        with clock.lap("publish"):
            cast.engine.load(cast.learner.publish())
        readings = measured | _rollout_metrics(groups, rewards, clock) | cast.engine.metrics() | learned
        observer.after_step(step, values(readings | clock.metrics()))


class Stopwatch:
    """Seconds of each part of a step."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def lap(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[part] = time.perf_counter() - start

    def metrics(self) -> Metrics:
        """`time/<part>` and `time/step`, which also holds what lies between the parts."""
        parts = self.seconds | {"step": time.perf_counter() - self._start}
        return {f"time/{part}": Last(seconds) for part, seconds in parts.items()}


def _rollout_metrics(groups: Sequence[Group], rewards: Sequence[GroupRewards], clock: Stopwatch) -> Metrics:
    speed = num_tokens(groups) / clock.seconds["rollout"]
    return reward_metrics(rewards) | completion_metrics(groups) | {"perf/rollout_tokens_per_s": Last(speed)}
