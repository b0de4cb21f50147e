"""The process between a run and its reward workers: it starts them, hands out calls, and kills those past their limits.

    run  -- calls -->   keeper  -- one call -->  worker, one of several of each term
         <- results --          <-- outcomes --

It runs none of the terms' code but `preload`, so it always answers. Workers are forked from it: a new one has loaded
everything within milliseconds, and shares the memory of that. They and it end when the run does, however that ends.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import torch

from qarl.errors import ConfigurationError, RunError
from qarl.records import Completion, ErrorKind, Group, Prompt
from qarl.rewards.term import Failure, ForeignTerm, Outcome, failure

MOST_WORKERS = 8
"""So many calls run at a time, or as many as there are cores."""

START_SECONDS = 300.0
"""What a worker may take until it is ready: long enough to import any library."""

STALL_SECONDS = 10
"""A worker that is ready takes and gives messages at once; one that keeps the keeper waiting for longer is killed."""

OUT_OF_MEMORY = 113
"""Exit code of a worker."""

PR_SET_PDEATHSIG = 1
"""Linux's sys/prctl.h."""

Call = tuple[int, bytes]
"""A term, by its number, and what it is asked, `packed`."""

Result = list[Outcome] | Failure | ConfigurationError | RunError | None
"""Outcomes of every completion asked about, or one failure for all; None: not reached, because of an error before."""


def packed(asked: Group | Prompt | None) -> bytes:
    """What a term is asked: to score a group, to check a prompt's row, or only whether it is ready."""
    prompt = asked.prompt if isinstance(asked, Group) else asked
    completions = [
        # As arrays: a pickled tensor takes along all of the storage that it is a part of.
        (one.token_ids.numpy(), one.engine_logprobs.numpy(), one.versions.numpy(), one.finish_reason, one.text)
        for one in (asked.completions if isinstance(asked, Group) else ())
    ]
    try:
        return pickle.dumps((prompt, completions if isinstance(asked, Group) else None))
    # Whatever a source put into the row.
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        assert prompt is not None
        raise ConfigurationError(
            f"prompt {prompt.id}: its row cannot be sent to a reward's process ({error}); rows may hold numbers, "
            "texts, lists, mappings and arrays"
        ) from error


def unpacked(message: bytes) -> Group | Prompt | None:
    """What `packed` packed."""
    prompt, completions = pickle.loads(message)
    if completions is None:
        return prompt  # type: ignore[no-any-return]
    return Group(
        prompt,
        tuple(
            Completion(torch.from_numpy(ids), torch.from_numpy(logprobs), torch.from_numpy(versions), reason, text)
            for ids, logprobs, versions, reason, text in completions
        ),
    )


def main(descriptor: int) -> None:
    """Serve the run at the other end of this socket; the first message has the terms."""
    # Who stops the run, by whatever signal to all its processes, wants it to end in its own way.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run = Connection(descriptor)
    try:
        terms = _received(run)
        for term in terms:
            term.preload()
        # A collection in a worker would otherwise copy every page that holds an object.
        gc.freeze()
        Keeper(run, terms, min(MOST_WORKERS, os.cpu_count() or 1)).serve()
    except RunEnded:
        return


class RunEnded(Exception):
    """There is nobody left to answer."""


def _received(run: Connection[Any, Any]) -> Any:
    try:
        return run.recv()
    except (EOFError, OSError) as error:  # between two messages, or in the middle of one
        raise RunEnded from error


class Keeper:
    """Answers every list of calls with the list of their results, in order; at most `most_busy` are run at a time."""

    def __init__(self, run: Connection[Any, Any], terms: Sequence[ForeignTerm], most_busy: int) -> None:
        self._run = run
        self._terms = terms
        self._most_busy = most_busy
        self._workers: list[Worker] = []

    def serve(self) -> None:
        """Until the run's end of the socket is closed: RunEnded then."""
        try:
            while True:
                results = self._results(_received(self._run))
                try:
                    self._run.send(results)
                except ConnectionError as error:
                    raise RunEnded from error
        finally:
            for worker in self._workers:
                worker.end()

    def _results(self, calls: Sequence[Call]) -> list[Result]:
        """After an error no further calls are begun: the run is going to raise it."""
        results: list[Result] = [None] * len(calls)
        waiting = deque(enumerate(calls))
        while waiting or self._busy():
            while waiting and len(self._busy()) < self._most_busy:
                index, (term, payload) = waiting.popleft()
                while not self._idle(self._terms[term]).begin(index, payload):
                    pass  # an earlier call has left it in no state to work
            for worker in self._wait():
                result = worker.look()
                if result is not None:
                    results[worker.index] = result
                if isinstance(result, ConfigurationError | RunError):
                    waiting.clear()
            self._workers = [worker for worker in self._workers if worker.is_alive]
        return results

    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.is_busy]

    def _idle(self, term: ForeignTerm) -> Worker:
        for worker in self._workers:
            if worker.term is term and worker.is_alive and not worker.is_busy:
                return worker
        worker = Worker(term, [self._run, *(other.connection for other in self._workers)])
        self._workers.append(worker)
        return worker

    def _wait(self) -> list[Worker]:
        """Busy workers with news: a message, their end, or a limit that is passed."""
        busy = self._busy()
        seconds = min(worker.deadline for worker in busy) - time.monotonic()
        ready = wait([self._run, *(worker.connection for worker in busy)], max(seconds, 0.0))
        if self._run in ready:
            raise RunEnded  # as it sends nothing before it has its answer
        now = time.monotonic()
        return [worker for worker in busy if worker.connection in ready or worker.deadline <= now]


class Worker:
    """A process that runs calls of one term, one at a time, and at first gets ready for them."""

    def __init__(self, term: ForeignTerm, not_inherited: Iterable[Connection[Any, Any]]) -> None:
        self.term = term
        self.is_alive = True
        self.is_busy = False
        self.index = -1
        self._payload: bytes | None = None
        self._is_ready = False
        self.deadline = time.monotonic() + self._seconds
        self.connection, theirs = Pipe()
        keeper_id = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            _live(term, theirs, keeper_id, (*not_inherited, self.connection))
        theirs.close()
        _limit_waiting(self.connection)

    def begin(self, index: int, payload: bytes) -> bool:
        """Run a call, at once or as soon as the worker is ready. False: it has died since its last call, or hangs."""
        assert self.is_alive and not self.is_busy
        self.is_busy, self.index, self._payload = True, index, payload
        if self._is_ready and not self._hand_over():
            self.end()
        return self.is_alive

    def look(self) -> Result:
        """The result of the call, if there is one by now: an answer, or why there is none."""
        if not self.connection.poll():
            self.end()
            return self._failed("timeout", f"took longer than {self._seconds:g} s")
        try:
            message: Result = self.connection.recv()
        except (EOFError, OSError):
            return self._failed("crash", _cause(self.end(), self.term.memory_mb))
        if not self._is_ready and message is None:
            self._is_ready = True
            if not self._hand_over():
                return self._failed("crash", _cause(self.end(), self.term.memory_mb))
            return None
        self.is_busy = False
        if not self._is_ready:
            self.end()
        return message

    def end(self) -> int:
        """Kill the worker and its process group, whatever of it is still there; how it had ended, as `wait` says it."""
        os.kill(self._pid, signal.SIGKILL)
        # One that has just begun has no group of its own yet.
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self.connection.close()
        self.is_alive = self.is_busy = False
        return os.waitpid(self._pid, 0)[1]

    def _hand_over(self) -> bool:
        assert self._payload is not None
        self.deadline = time.monotonic() + self._seconds
        try:
            self.connection.send_bytes(self._payload)
        except OSError:
            return False
        self._payload = None
        return True

    def _failed(self, kind: ErrorKind, reason: str) -> Failure | ConfigurationError:
        if self._is_ready:
            return Failure(kind, reason)
        return ConfigurationError(f"reward {self.term.label}: getting ready {reason}; see what it imports")

    @property
    def _seconds(self) -> float:
        return self.term.timeout if self._is_ready else START_SECONDS


def _limit_waiting(connection: Connection[Any, Any]) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_SECONDS, 0))


def _cause(status: int, memory_mb: int) -> str:
    """In words, how a process ended."""
    code = os.waitstatus_to_exitcode(status)
    if code == OUT_OF_MEMORY:
        return f"needed more than {memory_mb} MB of memory (memory_mb)"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended its process with exit code {code}"


def _live(
    term: ForeignTerm, keeper: Connection[Any, Any], keeper_id: int, of_others: Iterable[Connection[Any, Any]]
) -> NoReturn:
    """The life of a worker; it never returns into the keeper's code."""
    code = 1
    try:
        for connection in of_others:
            connection.close()
        # A process that the term's code forks must not hide from the keeper that the worker has died.
        os.register_at_fork(after_in_child=keeper.close)
        _confine(term.memory_mb, keeper_id)
        _work(term, keeper)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if not isinstance(leaving.code, int | None):
            print(leaving.code, file=sys.stderr)  # as Python does at a process's end
    except MemoryError:
        code = OUT_OF_MEMORY
    except (EOFError, ConnectionError):
        code = 0  # the keeper has ended
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code & 0xFF)


def _work(term: ForeignTerm, keeper: Connection[Any, Any]) -> None:
    """Say that the term is ready, or why it is not, and answer calls."""
    try:
        term.prepare()
    except ConfigurationError as error:
        keeper.send(ConfigurationError(str(error)))
        return
    keeper.send(None)
    while True:
        keeper.send(_answer(term, keeper.recv_bytes()))


def _confine(memory_mb: int, keeper_id: int) -> None:
    """A session of its own, death together with the keeper, and a limit on memory."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # nothing flushes them when it is killed
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper_id:
            os._exit(0)  # it ended before it could be bound to
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[5]) * resource.getpagesize()
        most, allowed = used + (memory_mb << 20), resource.getrlimit(resource.RLIMIT_DATA)[1]
        most = most if allowed == resource.RLIM_INFINITY else min(most, allowed)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _answer(term: ForeignTerm, payload: bytes) -> list[Outcome] | Failure | ConfigurationError | RunError:
    """Errors are made anew: the term's own classes may not be known outside."""
    try:
        asked = unpacked(payload)
        if isinstance(asked, Prompt):
            term.check(asked)
        return term.score_group(asked) if isinstance(asked, Group) else []
    except ConfigurationError as error:
        return ConfigurationError(str(error))
    except RunError as error:
        return RunError(str(error))
    except (MemoryError, SystemExit):
        raise
    # Other people's code may raise anything, and libraries do raise what is no Exception.
    except BaseException as error:
        return failure(error)
