"""Engine and learner of rank 0, as the loop sees them: every call is an order to all ranks.

The leader alone knows prompts' rows, rewards and the run's folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from torch import Tensor
from torch.distributed.tensor import DTensor

from qarl.cluster.crew import Crew
from qarl.cluster.ranks import CrewRanks
from qarl.learner.learner import LocalLearner
from qarl.metrics import Metrics, Sum, merge
from qarl.records import Advantages, Completion, Group, Prompt, Sampling, Snapshot
from qarl.roles import Engine, Stop
from qarl.rollout.native import NativeEngine
from qarl.rollout.request import unstarted


class LeadersEngine:
    """The leader's engine alone makes completions, on servers or in other processes; followers have none."""

    def __init__(self, crew: Crew, engine: Engine) -> None:
        self._crew = crew
        self._engine = engine

    @property
    def version(self) -> int:
        return self._engine.version

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int, ...],
        stop: Stop | None = None,
    ) -> list[Group]:
        """As the engine's."""
        return self._engine.generate(prompts, group_size, sampling, seed, stop)

    def load(self, snapshot: Snapshot) -> None:
        """Serve what every rank's learner published, once it is sure to be the same; an engine of its own too."""
        with self._crew.order("load", snapshot.version, snapshot.checksum):
            self._engine.load(snapshot)

    def metrics(self) -> Metrics:
        return self._engine.metrics()


class LeadingEngine(LeadersEngine):
    """Rollouts by the engines of all ranks; which completions are whose changes none of them."""

    def __init__(self, crew: Crew, engine: NativeEngine) -> None:
        super().__init__(crew, engine)
        self._own = engine
        self._metrics: Metrics = {}

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int, ...],
        stop: Stop | None = None,
    ) -> list[Group]:
        """As `NativeEngine.generate`. `stop` is asked with what this rank has finished, as long as it has work: what
        others have done is known when all of them answer.
        """
        # Of a prompt's row only rewards, which are the leader's, know what it is.
        bare = [replace(prompt, text="", row={}) for prompt in prompts]
        groups = unstarted(bare, group_size)
        with self._crew.order("generate", groups, sampling, seed) as answers:
            own = share_of(self._crew, self._own, groups, sampling, seed, stop and self._for_all(stop, groups))
        self._metrics = merge(metrics for _, metrics in [own, *answers])
        completions = iter([completion for made, _ in [own, *answers] for completion in made])
        return [Group(prompt, tuple(next(completions) for _ in range(group_size))) for prompt in prompts]

    def _for_all(self, stop: Stop, groups: Sequence[Group]) -> Stop:
        """What the leader's engine asks, of its share of these groups, to stop all ranks."""
        own = len(_places(groups, self._crew.rank, self._crew.count))
        whole = sum(len(group.completions) for group in groups)

        def is_enough(finished: int, total: int) -> bool:
            found = stop(own - (total - finished), whole)  # in a share, completions of other ranks count as finished
            if found:
                self._crew.give_up()
            return found

        return is_enough

    def metrics(self) -> Metrics:
        return self._metrics


class LeadingLearner:
    """The learners of all ranks as one."""

    def __init__(self, crew: Crew, learner: LocalLearner) -> None:
        self._crew = crew
        self._learner = learner

    @property
    def version(self) -> int:
        return self._learner.version

    @property
    def optimizer_steps(self) -> int:
        return self._learner.optimizer_steps

    def publish(self) -> Snapshot:
        return self._learner.publish()

    def update(self, groups: Sequence[Group], advantages: Advantages) -> Metrics:
        """As `LocalLearner.update`, and how many bytes this rank sent for it."""
        before = self._crew.exchange.sent
        bare = [Group(replace(group.prompt, text="", row={}), group.completions) for group in groups]
        with self._crew.order("update", bare, list(advantages)):
            metrics = self._learner.update(groups, advantages)
        return metrics | {"cluster/sent_bytes": Sum(float(self._crew.exchange.sent - before))}

    def save(self, folder: Path) -> None:
        """As `LocalLearner.save`, to be read by any number of ranks."""
        with self._crew.order("show_state"):
            pass
        self._learner.save(folder)

    def restore(self, folder: Path) -> None:
        """From what any number of ranks saved. This rank alone reads the folder."""
        state, tensors = self._learner.read(folder)
        with self._crew.order("take_over", state):
            self._learner.take_over(state, tensors)


class LeadingRanks(CrewRanks):
    """The leader's: it can ask for what others hold."""

    def __init__(self, crew: Crew) -> None:
        super().__init__(crew.exchange)
        self._crew = crew

    def fetch(self, key: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.detach()
        with self._crew.order("give", key):
            whole = self._exchange.collect(tensor.to_local().detach(), len(tensor))
        assert whole is not None
        return whole


def share_of(
    crew: Crew,
    engine: NativeEngine,
    groups: Sequence[Group],
    sampling: Sampling,
    seed: tuple[int, ...],
    stop: Stop | None = None,
) -> tuple[list[Completion], Metrics]:
    """This rank's completions of unfinished groups, and what its engine measured."""
    part = part_of(groups, crew.rank, crew.count)
    if not part:
        return [], {}
    return own_completions(part, engine.resume(part, sampling, seed, stop)), engine.metrics()


def part_of(groups: Sequence[Group], rank: int, ranks: int) -> list[Group]:
    """What a rank's engine is given of unfinished groups: its own completions, all others finished.

    Others' groups stay where the same prompt comes again: how often it came before is part of a completion's seed.
    """
    mine = _places(groups, rank, ranks)
    place = count()
    marked = [
        Group(group.prompt, tuple(c if next(place) in mine else _finished(c) for c in group.completions))
        for group in groups
    ]
    own = [any(c.finish_reason == "aborted" for c in group.completions) for group in marked]
    prompts = {group.prompt.id for group, is_own in zip(marked, own, strict=True) if is_own}
    return [group for group in marked if group.prompt.id in prompts]


def own_completions(part: Sequence[Group], made_of: Sequence[Group]) -> list[Completion]:
    """The completions that a rank made of its `part`, in order."""
    return [
        made
        for before, after in zip(part, made_of, strict=True)
        for old, made in zip(before.completions, after.completions, strict=True)
        if old.finish_reason == "aborted"
    ]


def _places(groups: Sequence[Group], rank: int, ranks: int) -> range:
    """A rank's completions among all of them: neighbours, so that few prompts are computed twice."""
    total = sum(len(group.completions) for group in groups)
    return range(total * rank // ranks, total * (rank + 1) // ranks)


def _finished(completion: Completion) -> Completion:
    return replace(completion, finish_reason="stop")
