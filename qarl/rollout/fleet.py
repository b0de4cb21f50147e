"""Several engines as one: prompts are split over them, weights go to all, and an engine that is lost is replaced.

Which engine completes a prompt changes no bit of the completion, where the engines are our own. Every engine is called
from a thread of its own, so two native engines of one process, which share its kernels, cannot be in one fleet.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from qarl.errors import RunError
from qarl.metrics import Last, Mean, Metrics, merge
from qarl.records import Group, Prompt, Sampling, Snapshot
from qarl.roles import Engine, Stop
from qarl.rollout.request import Progress

log = logging.getLogger("qarl")

Answer = TypeVar("Answer")

Make = Callable[[int, Progress], Engine]
"""Makes the engine with this index, at the start and whenever the one before it was lost; it serves nothing yet."""


class EngineLost(RunError):
    """An engine has died or gives no sign of life: another one may do its work."""


@dataclass(slots=True, eq=False)
class _Call:
    """What the engines' threads send to who asked: (kind, index, content), of kind `progress`, `answer` or `error`."""

    inbox: SimpleQueue[tuple[str, int, Any]] = field(default_factory=SimpleQueue)
    is_abandoned: bool = False


class _Tally:
    """How many completions of a rollout the engines have finished, and whether that is enough."""

    def __init__(self, engines: int, total: int, stop: Stop | None) -> None:
        self._finished = [0] * engines
        self._total = total
        self._stop = stop
        self._is_enough = False
        self._lock = Lock()

    def is_enough(self, index: int, finished: int) -> bool:
        """Told by an engine what it has finished; once enough is always enough."""
        with self._lock:
            self._finished[index] = finished
            if self._stop is not None and not self._is_enough:
                self._is_enough = self._stop(sum(self._finished), self._total)
            return self._is_enough


class Fleet:
    """`count` engines that `make` makes; up to `restarts` of them are replaced when they are lost.

    A replacement is given the weights of now and asked again what the lost one was asked. Errors of an engine bear its
    index. `progress` is told (finished, all) completions of the whole fleet, on the caller's thread. An engine that is
    silent for `timeout_s` is to give up by itself; what was asked before is waited for twice as long.
    """

    def __init__(
        self, make: Make, count: int, timeout_s: float, restarts: int = 0, progress: Progress | None = None
    ) -> None:
        self.version = -1
        self.count = count
        self._make = make
        self._timeout_s = timeout_s
        self._allowed = restarts
        self._restarts = 0
        self._lock = Lock()
        self._progress = progress
        self._engines: list[Engine | EngineLost | None] = [None] * count
        self._snapshot: Snapshot | None = None
        self._threads: list[Thread] = []
        self._call = _Call()
        self._metrics: Metrics = {}
        self._ask(range(count), lambda index, engine: None)

    def load(self, snapshot: Snapshot) -> None:
        """Give all engines these weights; RunError when one of them refuses or then serves another version.

        An engine that is lost meanwhile is missed by the next rollout: there a run has finished its step, and can save.
        """

        def serve(index: int, engine: Engine) -> None:
            try:
                _serve(engine, snapshot)
            except EngineLost as error:
                self._engines[index] = error

        before, self._snapshot = self._snapshot, snapshot
        try:
            self._ask(range(self.count), serve)
        except Exception:
            self._snapshot = before
            raise
        self.version = snapshot.version

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int, ...],
        stop: Stop | None = None,
    ) -> list[Group]:
        """As of every engine; how the prompts are split changes no bit. `stop` is asked on the engines' threads, one at
        a time.
        """
        shares = split(prompts, self.count, group_size, sampling)
        asked = [index for index, share in enumerate(shares) if share]
        total, finished = len(prompts) * group_size, [0] * self.count
        tally = _Tally(self.count, total, stop)

        def complete(index: int, engine: Engine) -> tuple[list[Group], Metrics, float]:
            started, call = time.perf_counter(), self._call

            def is_enough(done: int, of_share: int) -> bool:
                return call.is_abandoned or tally.is_enough(index, done)

            share = [prompts[place] for place in shares[index]]
            groups = engine.generate(share, group_size, sampling, seed, is_enough)
            return groups, engine.metrics(), time.perf_counter() - started

        def tell(index: int, count: int) -> None:
            finished[index] = count
            if self._progress is not None:
                self._progress(sum(finished), total)

        answers = self._ask(asked, complete, tell)
        self._metrics = merge(metrics for _, metrics, _ in answers.values()) | _idle([s for *_, s in answers.values()])
        found = {place: group for index in asked for place, group in zip(shares[index], answers[index][0], strict=True)}
        return [found[place] for place in range(len(prompts))]

    def metrics(self) -> Metrics:
        """The engines' readings of the last rollout, `engine/idle`, the share of time that engines waited for the last
        one, and `engine/restarts`, how many were replaced so far.
        """
        return self._metrics | {"engine/restarts": Last(float(self._restarts))}

    def _ask(
        self,
        indices: Sequence[int],
        work: Callable[[int, Engine], Answer],
        tell: Callable[[int, int], None] = lambda index, finished: None,
    ) -> dict[int, Answer]:
        """What these engines answer, all asked at the same time; the first error is raised without waiting for others.

        An interrupt does not wait either. What then is still running is told to stop, and waited for by the next call.
        """
        self._wait_for_the_last_call()
        call = self._call = _Call()
        self._threads = [
            Thread(target=self._work, args=(call, index, work), name=f"engine {index}", daemon=True)
            for index in indices
        ]
        for thread in self._threads:
            thread.start()
        answers: dict[int, Answer] = {}
        try:
            while len(answers) < len(indices):
                kind, index, content = call.inbox.get()
                if kind == "error":
                    raise content
                if kind == "progress":
                    tell(index, content)
                else:
                    answers[index] = content
        except BaseException:
            call.is_abandoned = True
            raise
        return answers

    def _wait_for_the_last_call(self) -> None:
        """RunError where an engine does not end what it was asked then."""
        until = time.monotonic() + 2 * self._timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                raise RunError(
                    f"{thread.name}: still works on what was given up {2 * self._timeout_s:g} s ago; start the run "
                    "again with --resume, with a longer cluster.timeout_s (of servers, engine.timeout_s) if that is "
                    "how long it takes"
                )

    def _work(self, call: _Call, index: int, work: Callable[[int, Engine], Any]) -> None:
        """The thread of one engine."""
        try:
            call.inbox.put(("answer", index, self._insist(call, index, work)))
        except BaseException as error:  # raised again by who asked
            call.inbox.put(("error", index, error))

    def _insist(self, call: _Call, index: int, work: Callable[[int, Engine], Answer]) -> Answer:
        """The answer of this engine or, as long as lost ones may be replaced, of another in its place."""
        while True:
            try:
                return work(index, self._engine(index))
            except EngineLost as error:
                self._engines[index] = error
                if call.is_abandoned:
                    raise
            except RunError as error:
                raise RunError(f"engine {index}: {error}") from error

    def _engine(self, index: int) -> Engine:
        """The engine with this index; a new one, serving what the others do, where there is none or no more."""
        engine = self._engines[index]
        if isinstance(engine, EngineLost):
            self._count_loss(index, engine)
        if engine is None or isinstance(engine, EngineLost):
            engine = self._make(index, lambda finished, total: self._call.inbox.put(("progress", index, finished)))
            if self._snapshot is not None:
                _serve(engine, self._snapshot)
            self._engines[index] = engine
        return engine

    def _count_loss(self, index: int, error: EngineLost) -> None:
        """RunError, by what the engine was lost, when it may not be replaced."""
        with self._lock:
            if self._restarts == self._allowed:
                raise RunError(str(error)) from error
            self._restarts += 1
        log.warning("engine %d: %s; it is replaced, %d of %d times", index, error, self._restarts, self._allowed)


def split(prompts: Sequence[Prompt], count: int, group_size: int, sampling: Sampling) -> list[list[int]]:
    """Places of the prompts that each of `count` engines completes, ascending; about the same work for each.

    Prompts with the same id stay together, for an engine tells them apart by how many came before.
    """
    same: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        same.setdefault(prompt.id, []).append(place)

    def tokens(places: Sequence[int]) -> int:
        return sum(len(prompts[place].token_ids) + group_size * sampling.max_new_tokens for place in places)

    shares: list[list[int]] = [[] for _ in range(count)]
    work = [0] * count
    for places in sorted(same.values(), key=tokens, reverse=True):
        least = work.index(min(work))
        shares[least] += places
        work[least] += tokens(places)
    return [sorted(share) for share in shares]


def _serve(engine: Engine, snapshot: Snapshot) -> None:
    engine.load(snapshot)
    if engine.version != snapshot.version:
        raise RunError(f"serves version {engine.version} after version {snapshot.version} was loaded")


def _idle(seconds: Sequence[float]) -> Metrics:
    longest = max(seconds, default=0.0)
    return {"engine/idle": Mean(sum(longest - one for one in seconds), longest * len(seconds))}
