"""Every rank but the first: does what it is told, and touches neither the console nor the run's folder."""

from __future__ import annotations

import logging
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from qarl.cluster.crew import STOP, Crew, Fault, follow
from qarl.cluster.launch import end, record
from qarl.cluster.leader import share_of
from qarl.errors import ConfigurationError, RunError
from qarl.learner.learner import LocalLearner
from qarl.metrics import Metrics
from qarl.records import Advantages, Completion, Group, Sampling
from qarl.rollout.native import NativeEngine

SECONDS_AFTER_A_SIGNAL = 10.0
"""How long a follower that was told to end waits for a leader that gives no sign of life."""


class Follower:
    """The orders there are, by name; without an engine it is never told to `generate`."""

    def __init__(self, crew: Crew, engine: NativeEngine | None, learner: LocalLearner) -> None:
        self._crew = crew
        self._engine = engine
        self._learner = learner
        self._state: Mapping[str, Tensor] = {}

    def obey(self) -> None:
        """Until the leader says that it is over."""
        orders: dict[str, Callable[..., Any]] = {
            order.__name__: order
            for order in (self.generate, self.load, self.update, self.show_state, self.give, self.take_over)
        }
        while True:
            name, arguments = self._crew.next_order()
            if name == STOP:
                return
            try:
                answer = orders[name](*arguments)
            except (ConfigurationError, RunError) as error:
                answer = Fault.of(error)
            self._crew.answer(answer)

    def generate(
        self, groups: Sequence[Group], sampling: Sampling, seed: tuple[int, ...]
    ) -> tuple[list[Completion], Metrics]:
        """This rank's completions, given up where the leader no longer waits for them."""
        assert self._engine is not None
        return share_of(self._crew, self._engine, groups, sampling, seed, lambda *_: self._crew.is_called_off())

    def load(self, version: int, checksum: str) -> None:
        """Serve what the learner here published. RunError where that is not what the leader's did."""
        snapshot = self._learner.publish()
        if (snapshot.version, snapshot.checksum) != (version, checksum):
            raise RunError(
                f"rank {self._crew.rank} published other weights than the leader: version {snapshot.version}, checksum "
                f"{snapshot.checksum}; the leader version {version}, {checksum}"
            )
        if self._engine is not None:
            self._engine.load(snapshot)

    def update(self, groups: Sequence[Group], advantages: Advantages) -> None:
        """Train on this rank's part of the batch."""
        self._learner.update(groups, advantages)

    def show_state(self) -> None:
        """Get ready to `give` parts of the learner's state."""
        self._state = self._learner.state()

    def give(self, key: str) -> None:
        """Send this rank's rows of one tensor."""
        tensor = self._state[key]
        assert isinstance(tensor, DTensor), f"{key} is whole at the leader"
        self._crew.exchange.collect(tensor.to_local().detach(), len(tensor))

    def take_over(self, state: Mapping[str, Any]) -> None:
        """Go on from what the leader has read."""
        self._learner.take_over(state, {})


def serve(build: Callable[[str, Crew], Follower]) -> None:
    """A follower's whole life; `build` makes one of the recipe's text and the crew. Exits with 1 where it failed.

    Whatever goes wrong is for the leader to tell.
    """
    logging.getLogger("qarl").addHandler(logging.NullHandler())
    logging.getLogger("qarl").propagate = False
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # without a trace of where
    crew, recipe = follow()

    def told_to_end(number: int, frame: FrameType | None) -> None:
        crew.patience_s = min(crew.timeout_s, SECONDS_AFTER_A_SIGNAL)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, told_to_end)  # the leader decides when, and what is saved before
    try:
        build(recipe, crew).obey()
    except Exception as error:
        if (fault := crew.fault_of_others()) is not None:
            record(fault.words)
        else:
            own = Fault.of(error, f"rank {crew.rank}: ")
            crew.leave_word(own)
            record(f"{own.words}\n{''.join(traceback.format_exception(error))}")
        crew.leave()
        end(1)
    crew.leave()
