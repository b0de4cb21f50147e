"""Several engines as one, with engines that are plain Python: how work is split, what becomes of errors."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from qarl.errors import ConfigurationError, RunError
from qarl.metrics import Mean, Metrics
from qarl.records import Completion, FinishReason, Group, Prompt, Sampling, Snapshot
from qarl.roles import Stop
from qarl.rollout.fleet import EngineLost, Fleet, split
from qarl.rollout.native import Progress
from qarl.rollout.seeds import stream_key

SAMPLING = Sampling(max_new_tokens=10)


def prompt(name: str, length: int = 1) -> Prompt:
    return Prompt(name, (1,) * length, "", {})


def prompts(*names: str) -> list[Prompt]:
    return [prompt(name) for name in names]


@dataclass
class FakeEngine:
    """A completion's one token is of its seed alone, with repeats counted as a native engine counts them."""

    index: int
    progress: Progress
    asked: list[list[str]] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    version: int = -1
    before: Callable[[], object] = lambda: None
    is_stuck: bool = False
    is_stopped: bool = False

    def load(self, snapshot: Snapshot) -> None:
        self.before()
        self.loaded.append(snapshot.version)
        self.version = self.version if self.is_stuck else snapshot.version

    def generate(
        self,
        prompts: Sequence[Prompt],
        group_size: int,
        sampling: Sampling,
        seed: tuple[int, ...],
        stop: Stop | None = None,
    ) -> list[Group]:
        self.asked.append([one.id for one in prompts])
        self.is_stopped = False
        self.before()
        groups = []
        for place, one in enumerate(prompts):
            repeats = self.asked[-1][:place].count(one.id)
            keys = [stream_key((*seed, repeats), one.id, index) >> 1 for index in range(group_size)]
            finish_reason = "aborted" if self.is_stopped else "stop"
            groups.append(Group(one, tuple(self._completion(key, finish_reason) for key in keys)))
            self.progress((place + 1) * group_size, len(prompts) * group_size)
            self.is_stopped = stop is not None and stop((place + 1) * group_size, len(prompts) * group_size)
        return groups

    def metrics(self) -> Metrics:
        return {"perf/bubble": Mean(1.0, 4.0)}

    def _completion(self, key: int, finish_reason: FinishReason) -> Completion:
        return Completion(torch.tensor([key]), torch.tensor([-1.0]), torch.tensor([self.version]), finish_reason, "")


class Factory:
    """Makes fakes, and keeps them all; `before` is done in what an engine with that number, of all made, is asked."""

    def __init__(self, before: dict[int, Callable[[], object]] | None = None) -> None:
        self.made: list[FakeEngine] = []
        self.before = before or {}
        self._lock = threading.Lock()

    def __call__(self, index: int, progress: Progress) -> FakeEngine:
        with self._lock:
            engine = FakeEngine(index, progress)
            engine.before = self.before.get(len(self.made), engine.before)
            self.made.append(engine)
        return engine

    def of(self, index: int) -> list[FakeEngine]:
        return [engine for engine in self.made if engine.index == index]


def fleet_of(
    count: int, before: dict[int, Callable[[], object]] | None = None, timeout_s: float = 10.0, **settings: int
) -> tuple[Fleet, Factory]:
    """A fleet that serves version 0; engines of one index are made one after the other, so that numbers are known."""
    factory = Factory(before)
    fleet = Fleet(factory, count, timeout_s, **settings)
    fleet.load(Snapshot(0, {}, {}, ""))
    return fleet, factory


def tokens(groups: Sequence[Group]) -> list[list[int]]:
    return [[int(completion.token_ids) for completion in group.completions] for group in groups]


def failing(error: Exception, times: int = 1, after: int = 0) -> Callable[[], object]:
    """Raises in so many calls, after some that go well."""
    calls = []

    def fail() -> None:
        calls.append(None)
        if after < len(calls) <= after + times:
            raise error

    return fail


def test_work_is_split_evenly_and_every_share_keeps_the_order() -> None:
    longest = [prompt("a", 1), prompt("b", 100), prompt("c", 2), prompt("d", 3)]
    # Group size 2, at most 10 tokens: 21, 120, 22 and 23 tokens of work.
    assert split(longest, 2, 2, SAMPLING) == [[1], [0, 2, 3]]
    assert split(prompts(*"abcd"), 2, 2, SAMPLING) == [[0, 2], [1, 3]]
    assert split(prompts("a"), 3, 2, SAMPLING) == [[0], [], []]


def test_prompts_with_one_id_stay_together() -> None:
    assert split(prompts(*"abaca"), 2, 2, SAMPLING) == [[0, 2, 4], [1, 3]]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_how_prompts_are_split_changes_no_token_and_no_order(count: int) -> None:
    asked = prompts(*"abacadb")
    alone = FakeEngine(0, lambda finished, total: None).generate(asked, 3, SAMPLING, (7, 1))
    fleet, factory = fleet_of(count)
    found = fleet.generate(asked, 3, SAMPLING, (7, 1))
    assert tokens(found) == tokens(alone)
    assert [group.prompt for group in found] == asked
    assert sum(bool(engine.asked) for engine in factory.made) == min(count, 4)
    assert len({token for group in tokens(found) for token in group}) == 21


def test_weights_go_to_all_engines_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=10)
    fleet, factory = fleet_of(3, dict.fromkeys(range(3), together.wait))
    fleet.load(Snapshot(5, {}, {}, ""))
    assert fleet.version == 5
    assert [engine.loaded for engine in factory.made] == [[0, 5]] * 3


def test_an_engine_that_serves_another_version_is_refused() -> None:
    fleet, factory = fleet_of(2)
    stuck = factory.of(1)[0]
    stuck.is_stuck = True
    with pytest.raises(RunError, match=r"^engine 1: serves version 0 after version 3 was loaded"):
        fleet.load(Snapshot(3, {}, {}, ""))
    assert fleet.version == 0


def test_progress_is_that_of_all_engines_on_the_callers_thread() -> None:
    told: list[tuple[int, int]] = []
    threads = set()

    def progress(finished: int, total: int) -> None:
        threads.add(threading.current_thread())
        told.append((finished, total))

    fleet = Fleet(Factory(), 2, 10.0, progress=progress)
    fleet.generate(prompts(*"abc"), 2, SAMPLING, (0,))
    assert told == [(2, 6), (4, 6), (6, 6)]
    assert threads == {threading.main_thread()}


def test_readings_are_merged_and_waiting_is_measured() -> None:
    fleet, _ = fleet_of(2, {0: lambda: time.sleep(0.2)})
    fleet.generate(prompts(*"ab"), 1, SAMPLING, (0,))
    readings = {name: metric.value() for name, metric in fleet.metrics().items()}
    assert readings["perf/bubble"] == 0.25
    assert readings["engine/idle"] == pytest.approx(0.5, abs=0.1)
    assert readings["engine/restarts"] == 0


def test_errors_bear_the_engines_index_and_those_of_the_recipe_stay_what_they_are() -> None:
    fleet, factory = fleet_of(2)
    factory.of(1)[0].before = failing(RunError("weights overflow"))
    with pytest.raises(RunError, match=r"^engine 1: weights overflow$"):
        fleet.generate(prompts(*"ab"), 1, SAMPLING, (0,))
    factory.of(0)[0].before = failing(ConfigurationError("prompt a: too long"))
    with pytest.raises(ConfigurationError, match=r"^prompt a: too long$"):
        fleet.generate(prompts(*"ab"), 1, SAMPLING, (0,))
    factory.of(0)[0].before = failing(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        fleet.generate(prompts(*"ab"), 1, SAMPLING, (0,))


def test_the_first_error_does_not_wait_for_other_engines_but_the_next_call_does() -> None:
    fleet, factory = fleet_of(2)
    goes_on, at_work, most = threading.Event(), [0], [0]

    def work() -> None:
        at_work[0] += 1
        most[0] = max(most[0], at_work[0])
        goes_on.wait(10)
        at_work[0] -= 1

    factory.of(0)[0].before = work
    factory.of(1)[0].before = failing(RunError("died early"))
    with pytest.raises(RunError, match="died early"):
        fleet.generate(prompts(*"ab"), 1, SAMPLING, (0,))
    assert not goes_on.is_set()
    threading.Timer(0.1, goes_on.set).start()
    assert len(fleet.generate(prompts(*"ab"), 1, SAMPLING, (0,))) == 2
    assert most == [1]


def test_a_fleet_stops_as_a_whole_by_what_all_have_finished() -> None:
    fleet, factory = fleet_of(2)
    both = threading.Barrier(2, timeout=10)
    for engine in factory.made:
        engine.before = both.wait
    asked: list[tuple[int, int]] = []
    lock = threading.Lock()

    def stop(finished: int, total: int) -> bool:
        assert lock.acquire(blocking=False), "asked by two threads at a time"
        time.sleep(0.01)
        asked.append((finished, total))
        lock.release()
        return finished >= 4

    groups = fleet.generate(prompts(*"abcdefgh"), 2, SAMPLING, (0,), stop)
    assert asked[-1][0] >= 4 and {total for _, total in asked} == {16}
    aborted = [all(one.finish_reason == "aborted" for one in group.completions) for group in groups]
    assert 2 <= aborted.count(False) <= 4  # one each that were under way when it was said
    assert len(asked) == [finished >= 4 for finished, _ in asked].index(True) + 1  # once enough is always enough


def test_what_nobody_waits_for_is_stopped() -> None:
    fleet, factory = fleet_of(2)
    has_failed = threading.Event()
    factory.of(0)[0].before = lambda: has_failed.wait(10)
    factory.of(1)[0].before = failing(RunError("died early"))
    with pytest.raises(RunError, match="died early"):
        fleet.generate(prompts(*"abcd"), 1, SAMPLING, (0,))
    has_failed.set()
    for thread in fleet._threads:
        thread.join()
    assert factory.of(0)[0].is_stopped


def test_what_was_given_up_and_does_not_end_is_not_waited_for_without_end() -> None:
    fleet, factory = fleet_of(2, timeout_s=0.1)
    ends = threading.Event()
    factory.of(0)[0].before = lambda: ends.wait(20)
    factory.of(1)[0].before = failing(RunError("died early"))
    with pytest.raises(RunError, match="died early"):
        fleet.generate(prompts(*"ab"), 1, SAMPLING, (0,))
    started = time.monotonic()
    with pytest.raises(RunError, match=r"^engine 0: still works on what was given up 0\.2 s ago; .*cluster\.timeout_s"):
        fleet.generate(prompts(*"ab"), 1, SAMPLING, (0,))
    assert 0.2 <= time.monotonic() - started < 5
    ends.set()


def test_without_restarts_a_lost_engine_ends_the_run() -> None:
    fleet, factory = fleet_of(2)
    factory.of(1)[0].before = failing(EngineLost("process 7 was killed"))
    with pytest.raises(RunError, match=r"^engine 1: process 7 was killed$") as caught:
        fleet.generate(prompts(*"ab"), 1, SAMPLING, (0,))
    assert not isinstance(caught.value, EngineLost)
    assert len(factory.made) == 2


def test_a_lost_engine_is_replaced_serves_the_weights_of_now_and_is_asked_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = tokens(fleet_of(2)[0].generate(prompts(*"abcd"), 2, SAMPLING, (1, 2)))
    fleet, factory = fleet_of(2, restarts=2)
    fleet.load(Snapshot(4, {}, {}, ""))
    factory.of(1)[0].before = failing(EngineLost("process 7 was killed"))
    with caplog.at_level(logging.WARNING, "qarl"):
        assert tokens(fleet.generate(prompts(*"abcd"), 2, SAMPLING, (1, 2))) == expected
    lost, new = factory.of(1)
    assert (new.loaded, new.asked) == ([4], lost.asked) == ([4], [["b", "d"]])
    assert [record.getMessage() for record in caplog.records] == [
        "engine 1: process 7 was killed; it is replaced, 1 of 2 times"
    ]
    assert fleet.metrics()["engine/restarts"].value() == 1
    assert tokens(fleet.generate(prompts(*"abcd"), 2, SAMPLING, (1, 2))) == expected
    assert len(factory.made) == 3


def test_replacements_that_are_lost_too_count_and_the_last_cause_is_told() -> None:
    lost = failing(EngineLost("no room"), times=9)
    factory = Factory()
    fleet = Fleet(factory, 1, 10.0, restarts=2)
    factory.before = {1: lost, 2: lost}
    fleet.load(Snapshot(0, {}, {}, ""))
    factory.made[0].before = failing(EngineLost("killed"))
    with pytest.raises(RunError, match=r"^engine 0: no room$"):
        fleet.generate(prompts("a"), 1, SAMPLING, (0,))
    assert len(factory.made) == 3


def test_an_engine_lost_while_it_loads_is_missed_by_the_next_rollout() -> None:
    fleet, factory = fleet_of(2)
    factory.of(0)[0].before = failing(EngineLost("killed while loading"))
    fleet.load(Snapshot(1, {}, {}, ""))
    assert fleet.version == 1
    with pytest.raises(RunError, match=r"^engine 0: killed while loading$"):
        fleet.generate(prompts(*"ab"), 1, SAMPLING, (0,))


def test_an_engine_lost_while_it_loads_is_replaced_for_the_next_rollout() -> None:
    fleet, factory = fleet_of(2, restarts=1)
    factory.of(0)[0].before = failing(EngineLost("killed while loading"))
    fleet.load(Snapshot(1, {}, {}, ""))
    groups = fleet.generate(prompts(*"ab"), 1, SAMPLING, (0,))
    assert [int(group.completions[0].versions) for group in groups] == [1, 1]
    assert factory.of(0)[1].loaded == [1]


def test_weights_that_were_refused_are_not_given_to_a_replacement() -> None:
    fleet, factory = fleet_of(2, restarts=1)
    for engine in factory.made:
        engine.before = failing(RunError("checksum"))
    with pytest.raises(RunError, match="checksum"):
        fleet.load(Snapshot(1, {}, {}, ""))
    factory.of(0)[0].before = failing(EngineLost("killed"))
    fleet.generate(prompts(*"ab"), 1, SAMPLING, (0,))
    assert factory.of(0)[1].loaded == [0]


def test_nothing_is_replaced_for_a_caller_who_has_left() -> None:
    fleet, factory = fleet_of(2, restarts=5)
    has_left = threading.Event()

    def lose_late() -> None:
        has_left.wait(10)
        raise EngineLost("stopped with the run")

    factory.of(0)[0].before = lose_late
    factory.of(1)[0].before = failing(RunError("the first cause"))
    with pytest.raises(RunError, match="the first cause"):
        fleet.generate(prompts(*"ab"), 1, SAMPLING, (0,))
    has_left.set()
    for thread in fleet._threads:
        thread.join()
    assert len(factory.made) == 2
