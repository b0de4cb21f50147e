"""Runs as processes, a few at a time, to their ends; a signal stops all of them in order."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from qarl.compare.jobs import Job
from qarl.interrupts import Interrupted, Interrupts

POLL_S = 0.1

PR_SET_PDEATHSIG = 1
"""Linux's sys/prctl.h."""

Command = Callable[[Job], list[str]]


class Watcher:
    """Who is told what happens in the pool."""

    def begun(self, job: Job, running: int) -> None:
        """A run's process has started."""

    def ended(self, job: Job, code: int, running: int) -> None:
        """A run's process has ended with this exit code, or by the signal -`code`."""

    def passed(self) -> None:
        """Some time has gone by."""

    def stopping(self, running: int) -> None:
        """A signal came, and the running are asked to save and end."""


class Pool:
    """At most `processes` runs at a time, each with `threads` OpenMP threads, in the order of the jobs."""

    def __init__(self, command: Command, processes: int, threads: int, watcher: Watcher) -> None:
        self._command = command
        self._processes = processes
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._watcher = watcher
        self._waiting: list[Job] = []
        self._running: dict[Job, subprocess.Popen[bytes]] = {}

    def run(self, jobs: Sequence[Job]) -> None:
        """Run all; Interrupted after a signal, when those that ran have saved and ended."""
        self._waiting = list(jobs)
        with Interrupts() as interrupts:
            try:
                while self._waiting or self._running:
                    while self._waiting and len(self._running) < self._processes:
                        self._start(self._waiting.pop(0))
                    with interrupts.allowed():
                        time.sleep(POLL_S)
                    self._look()
                    self._watcher.passed()
            except Interrupted:
                self._watcher.stopping(len(self._running))
                self._signal_all(signal.SIGINT)
                self._wait()
                raise
            finally:
                # After an impatient second signal, or a fault of ours: none may go on unseen.
                self._signal_all(signal.SIGKILL)

    def _start(self, job: Job) -> None:
        job.begin()
        with job.console.open("ab") as console:
            self._running[job] = subprocess.Popen(
                self._command(job),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                process_group=0,  # a terminal's ctrl-C reaches this process alone, which passes it on once
                preexec_fn=_end_with(os.getpid()),  # there is one thread
            )
        self._watcher.begun(job, len(self._running))

    def _look(self) -> None:
        for job, process in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[job]
                self._watcher.ended(job, code, len(self._running))

    def _wait(self) -> None:
        while self._running:
            time.sleep(POLL_S)
            self._look()

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self._running.values():
            process.send_signal(number)


def train_command(job: Job) -> list[str]:
    """`qarl train` of the job's recipe in its folder, going on where it stands."""
    return [
        *(sys.executable, "-m", "qarl", "train", str(job.asked)),
        *("--run-dir", str(job.folder.path), "--resume", "auto"),
    ]


def _end_with(parent: int) -> Callable[[], None] | None:
    """For a child to do first: be asked to save and end when this process ends, however it ends; on Linux."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def bind() -> None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(130)  # it ended before it could be bound to

    return bind
