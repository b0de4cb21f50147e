"""A keeper in a thread: its workers are forks of the test's own process, which are there at once."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe

import pytest
import torch

from qarl.errors import ConfigurationError, RunError
from qarl.records import Completion, Group, Prompt
from qarl.rewards import keeper
from qarl.rewards.function import Python
from qarl.rewards.keeper import Keeper, RunEnded, packed, unpacked
from qarl.rewards.term import Failure, ForeignTerm, Outcome

Answer = Outcome | ConfigurationError | RunError
Ask = Callable[[Group], list[Answer]]


@pytest.fixture
def keep() -> Iterator[Callable[..., Ask]]:
    """Starts a keeper of one term; what it returns asks it, completion by completion."""
    kept = []

    def start(term: ForeignTerm, most_busy: int = 2) -> Ask:
        ours, theirs = Pipe()

        def serve() -> None:
            with pytest.raises(RunEnded):
                Keeper(theirs, [term], most_busy).serve()

        thread = threading.Thread(target=serve)
        thread.start()
        kept.append((ours, thread))

        def ask(group: Group) -> list[Answer]:
            ours.send([(0, packed(call)) for call in term.calls(group)])
            return [result[0] if isinstance(result, list) else result for result in ours.recv()]

        return ask

    yield start
    for connection, thread in kept:
        # The workers, as forks of this process, have copies of this end, so that closing it would not do.
        with socket.socket(fileno=os.dup(connection.fileno())) as same:
            same.shutdown(socket.SHUT_RDWR)
        connection.close()
        thread.join(5)
        assert not thread.is_alive()


@pytest.fixture
def ask(keep, obedient) -> Ask:
    return keep(Python(function=obedient, style="verl", timeout=30.0, memory_mb=500))


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("sleep 1000", "timeout", "took longer than 1 s"),
        ("power", "timeout", "took longer than 1 s"),
        ("return fail(TimeoutError('no answer'))", "timeout", "TimeoutError: no answer"),
        ("exit 0", "crash", "ended its process with exit code 1"),
        ("return sys.exit()", "crash", "ended its process with exit code 0"),
        ("return sys.exit(3)", "crash", "ended its process with exit code 3"),
        ("exit_at_once 5", "crash", "ended its process with exit code 5"),
        ("signal SIGKILL", "crash", "was killed by SIGKILL"),
        ("signal SIGTERM", "crash", "was killed by SIGTERM"),
        ("die_with_a_fork_alive", "crash", "ended its process with exit code 7"),
        ("memory 8000", "crash", "needed more than 500 MB of memory (memory_mb)"),
        ("raise one\ntwo", "exception", "ValueError: one two"),
        ("raise_unexpected x", "exception", "Unexpected: x"),
        ("return float('nan')", "invalid", "returned nan; a reward must be finite, in 32 bits"),
        ("return 10**400 // 10**361", "invalid", f"returned {10**39}; a reward must be finite, in 32 bits"),
        ("return 'seven'", "invalid", "returned 'seven' (str), not a number"),
        ("return None", "invalid", "returned None (NoneType), not a number"),
    ],
)
def test_what_may_happen_to_one_call_happens_to_no_other(keep, obedient, told, text, kind, reason):
    # On a busy machine the harmless calls, too, take their time.
    timeout = 1.0 if reason == "took longer than 1 s" else 30.0
    ask = keep(Python(function=obedient, style="verl", timeout=timeout, memory_mb=500))
    assert ask(told("1", text, "2")) == [1.0, Failure(kind, reason), 2.0]
    assert ask(told("3", "4")) == [3.0, 4.0]


def test_results_come_in_the_order_of_the_calls_and_not_of_their_ends(ask, told):
    texts = ["return time.sleep(0.05) or 0", *(f"return {index}" for index in range(1, 12))]
    assert ask(told(*texts)) == [float(index) for index in range(12)]


def test_as_much_memory_as_is_allowed_may_be_taken(ask, told):
    assert ask(told("memory 400")) == [400.0 * 2**20]


@pytest.mark.parametrize(("most_busy", "met"), [(2, True), (1, False)])
def test_so_many_calls_run_at_a_time_and_no_more(keep, obedient, told, tmp_path, most_busy, met):
    ask = keep(Python(function=obedient, style="verl", timeout=30.0 if met else 1.0), most_busy)
    results = ask(told(f"meet {tmp_path}/one", f"meet {tmp_path}/two"))
    # The second finds the mark that the first has left.
    assert results == [1.0 if met else Failure("timeout", "took longer than 1 s"), 1.0]


def test_a_worker_is_used_again_and_replaced_when_it_has_died(ask, told, has_ended):
    [first], [second] = ask(told("pid")), ask(told("pid"))
    assert first == second
    ask(told("exit_at_once 1"))
    [third] = ask(told("pid"))
    assert third != first
    assert has_ended(int(first))


def test_processes_that_a_call_has_started_end_with_it(keep, obedient, told, tmp_path, has_ended):
    ask = keep(Python(function=obedient, style="verl", timeout=1.0))
    assert ask(told(f"start_child {tmp_path}/pid")) == [Failure("timeout", "took longer than 1 s")]
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_an_interrupt_from_the_keyboard_is_the_runs_affair(ask, told):
    assert ask(told("signal SIGINT", "return os.getsid(0) == os.getpid()")) == [1.0, 1.0]


@pytest.mark.parametrize(("action", "error"), [("refuse", ConfigurationError), ("give_up", RunError)])
def test_an_error_arrives_as_itself_and_nothing_is_begun_after_it(keep, obedient, told, action, error):
    ask = keep(Python(function=obedient, style="verl"), 1)
    first, raised, third = ask(told("1", f"{action} the reason", "2"))
    assert first == 1.0
    assert type(raised) is error and str(raised) == "the reason"
    assert third is None
    assert ask(told("3")) == [3.0]


@pytest.mark.parametrize(
    ("module", "problem"),
    [
        ("import sys; sys.exit(0)", "getting ready ended its process with exit code 0; see what it imports"),
        ("import time; time.sleep(1000)", r"getting ready took longer than 0\.5 s; see what it imports"),
        ("1 / 0", "importing .* failed .ZeroDivisionError"),
    ],
)
def test_a_term_that_does_not_get_ready_is_a_fault_of_the_configuration(
    monkeypatch, keep, told, tmp_path, module, problem
):
    monkeypatch.setattr(keeper, "START_SECONDS", 0.5)
    path = tmp_path / "module.py"
    path.write_text(module, encoding="utf-8")
    [result] = keep(Python(function=f"{path}:f", style="verl"))(told("1"))
    with pytest.raises(ConfigurationError, match=f"reward .*{problem}"):
        raise result


@pytest.mark.parametrize("signal", ["SIGSTOP", "SIGKILL"])
def test_what_a_call_leaves_behind_is_not_the_next_ones_fault(monkeypatch, ask, told, signal):
    monkeypatch.setattr(keeper, "STALL_SECONDS", 1)
    assert ask(told(f"signal_later {signal}")) == [1.0]
    time.sleep(0.3)
    # Longer than what fits into the socket, so that handing it over would wait for the worker.
    assert ask(told("2" + " " * 10**6)) == [2.0]


def test_a_group_is_sent_with_its_own_bytes_alone(make_prompt):
    storage = torch.arange(1_000_000)
    completion = Completion(storage[5:8], torch.tensor([-1.0, -2.0, -3.0]), storage[:3], "length", "so")
    message = packed(Group(make_prompt(level=[3]), (completion,)))
    assert len(message) < 2000
    group = unpacked(message)
    assert isinstance(group, Group)
    assert (group.prompt.id, group.prompt.row) == ("sums/1", {"level": [3]})
    [read] = group.completions
    assert read.token_ids.tolist() == [5, 6, 7]
    assert read.engine_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert (read.versions.tolist(), read.finish_reason, read.text) == ([0, 1, 2], "length", "so")


def test_a_prompt_and_nothing_are_sent_too(make_prompt):
    prompt = unpacked(packed(make_prompt(answer="7")))
    assert isinstance(prompt, Prompt)
    assert prompt.row == {"answer": "7"}
    assert unpacked(packed(None)) is None


def test_a_row_that_cannot_be_sent_is_named(make_prompt):
    with pytest.raises(ConfigurationError, match="prompt sums/1: its row cannot be sent to a reward's process"):
        packed(make_prompt(answer=threading.Lock()))
