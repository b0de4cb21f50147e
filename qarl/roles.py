"""What each room must be able to do: the verbs of the system. `loop.py` knows these and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from qarl.metrics import Metrics
from qarl.records import Advantages, Group, GroupRewards, LossInputs, Prompt, Sampling, Snapshot


class PromptSource(Protocol):
    @property
    def fingerprint(self) -> str:
        """What identifies the data of a step's prompts, so far as it is known before they are taken."""
        ...

    @property
    def skipped(self) -> int:
        """Rows left out so far because their prompt was too long."""
        ...

    def take(self, step: int, count: int) -> list[Prompt]:
        """The prompts of a step: a function of (seed, step), so that a resumed run sees the same ones."""
        ...


Stop = Callable[[int, int], bool]
"""Asked with (finished, total) completions again and again, after every step where an engine takes them one by one,
whether to abort the others.
"""


class Engine(Protocol):
    @property
    def version(self) -> int: ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int, ...],
        stop: Stop | None = None,
    ) -> list[Group]:
        """`group_size` completions of every prompt, in the prompts' order; a function of the seed alone.

        Once `stop` says so, whatever is not finished is handed back as it is: "aborted", perhaps without a token.
        """
        ...

    def load(self, snapshot: Snapshot) -> None:
        """Serve these weights from now on; refuses a snapshot whose checksum does not match its tensors."""
        ...

    def metrics(self) -> Metrics:
        """Readings of the last `generate` and of the weights it used (`perf/*`, `engine/*`, `publish/*`)."""
        ...


class Reward(Protocol):
    def __call__(self, groups: Sequence[Group]) -> list[GroupRewards]: ...


class Advantage(Protocol):
    def __call__(self, rewards: Sequence[Tensor]) -> Advantages:
        """Rewards [G] of every group to advantages [G]; NaN rewards stay NaN and do not count."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class LossReport:
    """`loss` is this micro-batch's share of the whole batch's loss: shares add up."""

    loss: Tensor
    metrics: Metrics


class Objective(Protocol):
    @property
    def needs_entropy(self) -> bool: ...

    @property
    def needs_reference(self) -> bool: ...

    def __call__(self, inputs: LossInputs) -> LossReport: ...


class Learner(Protocol):
    """`optimizer_steps` counts changes of the weights: a failure before the next one leaves a state worth saving."""

    @property
    def version(self) -> int: ...

    @property
    def optimizer_steps(self) -> int: ...

    def update(self, groups: Sequence[Group], advantages: Advantages) -> Metrics:
        """Train on one rollout batch (`updates_per_batch` optimizer steps)."""
        ...

    def publish(self) -> Snapshot:
        """The current weights, quantized once; `version` counts rollout batches trained."""
        ...

    def save(self, folder: Path) -> None:
        """Everything needed to go on exactly, into an existing empty folder."""
        ...

    def restore(self, folder: Path) -> None: ...


class Observer(Protocol):
    """Follows a run step by step: measures, shows, stores. It may stop the run by raising, but never changes it."""

    def before_step(self, step: int) -> Metrics:
        """What is to be measured of weight version `step` before it is used; reported with the step."""
        ...

    def after_rollout(self, step: int, groups: Sequence[Group], rewards: Sequence[GroupRewards]) -> None:
        """The step's completions, before they are trained on."""
        ...

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """The step is trained, published and served; `step` counts from 0."""
        ...


class Tracker(Protocol):
    """Shows or stores what a run measured; arguments as in `Observer`."""

    def rollout(self, step: int, groups: Sequence[Group], rewards: Sequence[GroupRewards]) -> None: ...

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Held-out figures of the weights after `step` finished steps."""
        ...

    def close(self) -> None: ...
