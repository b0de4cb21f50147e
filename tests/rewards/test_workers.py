"""Worker processes as a run sees them: a keeper of its own process, whatever ends in the middle."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from qarl.errors import ConfigurationError, RunError
from qarl.interrupts import Interrupted
from qarl.rewards.function import Python
from qarl.rewards.term import Failure
from qarl.rewards.workers import Workers


@pytest.fixture(scope="module")
def workers(obedient: str) -> Iterator[Workers]:
    terms = [
        Python(function=obedient, style="verl", name="one"),
        Python(function=obedient, style="verl", name="other"),
    ]
    workers = Workers(terms)
    yield workers
    workers.close()


def test_every_term_has_an_outcome_for_every_completion_of_every_group(workers, told):
    outcomes = workers.score([told("1", "2"), told(), told("pid", "raise x")])
    pids = [values[2].pop(0) for values in outcomes.values()]
    expected = [[1.0, 2.0], [], [Failure("exception", "ValueError: x")]]
    assert outcomes == {"one": expected, "other": expected}
    # Terms do not share processes: none can spoil another's modules.
    assert len({os.getpid(), *pids}) == 3


def test_what_a_function_does_to_its_arguments_and_its_process_stays_there(workers, told, tmp_path):
    group = told("pop", "pop", f"change_folder {tmp_path}", extra_info={"left": [1, 2]})
    folder = Path.cwd()
    for _ in range(2):
        assert workers.score([group])["one"] == [[1.0, 1.0, 1.0]]
    assert group.prompt.row["extra_info"] == {"left": [1, 2]}
    assert Path.cwd() == folder


def test_workers_have_neither_the_runs_locks_nor_its_standard_output(workers, told, tmp_path, capfd):
    workers.close()
    lock = tmp_path / "lock"
    with lock.open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        os.set_inheritable(holder.fileno(), True)
        workers.score([told("print some words")])
    with lock.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("some words") == 2


def test_rows_are_checked_and_the_first_bad_one_is_named(monkeypatch, workers, make_prompt):
    good = make_prompt("file/0", data_source="test", answer="7")
    bad = make_prompt("file/1", data_source="test", answer=None)
    workers.check([good, good])
    with pytest.raises(ConfigurationError, match="reward one: column `answer` is empty in the row of prompt file/1"):
        workers.check([good, bad, make_prompt("file/2")])
    assert workers.score([])["one"] == []
    monkeypatch.setattr(workers, "_ask", lambda calls: [Failure("timeout", "took longer than 1 s")] * len(calls))
    with pytest.raises(ConfigurationError, match="one: the row of prompt file/0 cannot be checked: took longer than 1"):
        workers.check([good])


def test_an_interrupt_in_the_middle_leaves_nothing_behind(workers, told, has_ended):
    [[pid]] = workers.score([told("pid")])["one"]

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(Interrupted):
            workers.score([told("sleep 1000", "1")])
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert has_ended(pid)
    assert workers.score([told("2", "3")])["one"] == [[2.0, 3.0]]


def test_workers_die_with_their_keeper_and_the_run_is_told(workers, told, has_ended):
    [[pid]] = workers.score([told("pid")])["one"]
    with pytest.raises(RunError, match="the process that keeps the reward workers has ended"):
        workers.score([told("kill_keeper")])
    assert has_ended(pid)
    assert workers.score([told("1")])["one"] == [[1.0]]


def test_close_ends_every_process(workers, told, has_ended):
    [[pid, keeper]] = workers.score([told("pid", "keeper_pid")])["one"]
    workers.close()
    assert has_ended(pid)
    assert has_ended(keeper)


def test_without_terms_there_are_no_processes(told):
    workers = Workers([])
    workers.prepare()
    assert workers.score([told("1")]) == {}
