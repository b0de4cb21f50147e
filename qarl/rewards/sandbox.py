"""Runs a program that nobody has read: one process that can compute, read its input and write its output.

Needs Linux 6.2 or newer with Landlock, on x86_64 or aarch64, and no privilege. `prove` shows on the machine itself
that every protection holds.
"""

from __future__ import annotations

import marshal
import os
import platform
import select
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from qarl.errors import ConfigurationError
from qarl.rewards import confined

START_SECONDS = 60.0
"""A machine that takes longer to start an interpreter is not one to judge programs on."""

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}

NOT_HERE = (
    "needs Linux 6.2 or newer with Landlock (among the kernel's lsm=..., and allowed by the container) on x86_64 or "
    "aarch64, and for scratch_mb user namespaces; use such a machine, or leave the reward out"
)


class SandboxError(Exception):
    """A program could not be started under protection: nothing is known about it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run of a program may take; wall-clock seconds, counted from when the program itself begins."""

    seconds: float = 5.0
    memory_bytes: int = 1 << 30
    output_bytes: int = 10_000_000
    scratch_bytes: int = 0
    packages: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A program and what is asked of it.

    `sources` are pairs of title and text, run in order in one namespace whose `__name__` is `module`. Afterwards
    `expressions` are evaluated there and their values reported, or `token` is reported: it shows that every source was
    run to its end.
    """

    sources: tuple[tuple[str, str], ...]
    stdin: str = ""
    module: str = "__main__"
    expressions: tuple[str, ...] = ()
    arguments: Any = None
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended. `fault` is None where it ended by itself, with status 0 and within its limits."""

    fault: str | None
    output: bytes
    errors: bytes
    report: bytes


def run(job: Job, limits: Limits) -> Ended:
    """Run the program to its end or to its limits; SandboxError where it could not be started."""
    with ExitStack() as stack:
        stdin, stdout, stderr, report = (_memory_file(stack, name) for name in ("stdin", "stdout", "stderr", "report"))
        os.pwrite(stdin, job.stdin.encode(), 0)
        work = _memory_file(stack, "job")
        os.pwrite(work, _marshalled(job, limits), 0)
        status, status_of_child = os.pipe()
        stack.callback(os.close, status)
        try:
            process = subprocess.Popen(
                [sys.executable, "-s", "-S", "-P", "-B", confined.__file__, *map(str, (work, status_of_child, report))],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(work, status_of_child, report),
                start_new_session=True,
                env=ENVIRONMENT,
                cwd="/",
            )
        finally:
            os.close(status_of_child)
        # A confined process is alone: whatever ends the wait, nothing is left when it is killed.
        stack.callback(process.wait)
        stack.callback(process.kill)
        if not _is_ready(status, START_SECONDS) or os.read(status, 64) != confined.STARTED:
            raise SandboxError(f"the sandbox did not start: {_last_line(stderr)}")
        fault = _fault(process, limits)
        output, errors, answer = (_content(file, limits.output_bytes) for file in (stdout, stderr, report))
        if fault is None and os.fstat(stdout).st_size > limits.output_bytes:
            fault = "wrote too much"
        return Ended(fault, output, errors, answer)


def _marshalled(job: Job, limits: Limits) -> bytes:
    return marshal.dumps(
        {
            "parent": os.getpid(),
            "seconds": limits.seconds,
            "memory_bytes": limits.memory_bytes,
            "output_bytes": limits.output_bytes,
            "scratch_bytes": limits.scratch_bytes,
            "packages": list(limits.packages),
            "module": job.module,
            "sources": job.sources,
            "expressions": job.expressions,
            "arguments": job.arguments,
            "token": job.token,
        }
    )


def _fault(process: subprocess.Popen[bytes], limits: Limits) -> str | None:
    handle = os.pidfd_open(process.pid)
    try:
        in_time = _is_ready(handle, limits.seconds)
    finally:
        os.close(handle)
    process.kill()  # without effect on one that has ended
    status = process.wait()
    if not in_time:
        return f"ran longer than {limits.seconds:g} s"
    return f"ended with status {status}" if status else None


def _is_ready(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(max(seconds, 0) * 1000))


def _memory_file(stack: ExitStack, name: str) -> int:
    """A file without a path: the program can neither find another one's nor leave one behind."""
    descriptor = os.memfd_create(name)
    stack.callback(os.close, descriptor)
    return descriptor


def _content(descriptor: int, most: int) -> bytes:
    return os.pread(descriptor, min(os.fstat(descriptor).st_size, most), 0)


def _last_line(stderr: int) -> str:
    lines = _content(stderr, 1 << 20).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


@lru_cache
def prove(limits: Limits) -> None:
    """Attack this machine from inside the sandbox; ConfigurationError with what was not prevented.

    Once a process for the same limits.
    """
    if sys.platform != "linux" or platform.machine() not in confined.ARCHITECTURES:
        raise ConfigurationError(
            f"the sandbox does not work on {platform.system()} with {platform.machine()}: it {NOT_HERE}"
        )
    inside = [path for path in limits.packages if Path(path).resolve().is_relative_to(confined.FOLDER)]
    if limits.scratch_bytes and inside:
        raise ConfigurationError(
            f"packages {', '.join(inside)}: with scratch_mb a program sees a {confined.FOLDER} of its own; move them"
        )
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.write_text("secret")
        settings = {
            "secret": str(secret),
            "trainer": os.getpid(),
            "memory": limits.memory_bytes,
            "output": limits.output_bytes,
            "scratch": limits.scratch_bytes,
            "folder": confined.FOLDER,
            "environment": sorted(ENVIRONMENT),
        }
        job = Job((("probe", f"settings = {settings!r}"), ("probe", PROBE)))
        try:
            ended = run(job, Limits(START_SECONDS, *_all_but_seconds(limits)))
        except SandboxError as error:
            raise ConfigurationError(f"{error}; it {NOT_HERE}") from error
    lines = ended.output.decode(errors="replace").splitlines()
    if ended.fault is not None or lines[-1:] != ["end"]:
        said = " ".join((ended.errors.decode(errors="replace").splitlines() or lines)[-1:])
        raise ConfigurationError(
            f"the sandbox cannot run a harmless program (it {ended.fault or 'stopped in the middle'}: {said!r}); raise "
            f"memory_mb, or see that {sys.base_prefix} is a whole Python installation"
        )
    if lines[:-1]:
        raise ConfigurationError(f"the sandbox does not hold: a program in it {', '.join(lines[:-1])}; it {NOT_HERE}")


def _all_but_seconds(limits: Limits) -> tuple[Any, ...]:
    return (limits.memory_bytes, limits.output_bytes, limits.scratch_bytes, limits.packages)


PROBE = """
import bisect, collections, ctypes, decimal, hashlib, heapq, json, math, os, random, re, resource, threading, _socket

secret, trainer = settings["secret"], settings["trainer"]


def open_files():
    found = [number for number in range(3, 1024) if exists(number)]
    return len(found) > 1 or None  # the report's own


def exists(number):
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def fork():
    if os.fork() == 0:
        os._exit(0)
    return True


def fill():
    path = os.path.join(settings["folder"], "a")
    try:
        with open(path, "wb") as file:
            for _ in range(settings["scratch"] // 65536 + 1):
                file.write(bytes(65536))
    finally:
        os.remove(path)
    return True


def prints():
    os.ftruncate(1, settings["output"] + settings["scratch"] + 1)
    os.ftruncate(1, 0)
    return True


def is_missing_scratch():
    try:
        with open(os.path.join(settings["folder"], "b"), "w") as file:
            file.write("b")
    except OSError:
        return settings["scratch"] > 0 or None
    return settings["scratch"] == 0 or None


def allocates():
    bytearray(settings["memory"])
    return True


ATTACKS = {
    "reads files": lambda: open(secret).read(),
    "writes files": lambda: open(secret, "a"),
    "empties files": lambda: os.truncate(secret, 0) or True,
    "creates files": lambda: open(secret + ".new", "w"),
    "makes folders": lambda: os.mkdir(secret + ".folder") or True,
    "changes the rights of files": lambda: os.chmod(secret, 0o644) or True,
    "changes the times of files": lambda: os.utime(secret) or True,
    "lists folders": lambda: os.listdir(os.path.dirname(secret)) or True,
    "reads other processes": lambda: open(f"/proc/{trainer}/environ").read() or True,
    "makes sockets": lambda: _socket.socket(),
    "starts processes": fork,
    "replaces itself": lambda: os.execv("/bin/true", ["true"]),
    "sends signals": lambda: os.kill(trainer, 0) or True,
    "changes the limits of other processes": lambda: resource.prlimit(trainer, resource.RLIMIT_NOFILE),
    "sees the environment": lambda: sorted(os.environ) != settings["environment"] or None,
    "holds open files": open_files,
    "takes more memory than its limit": allocates,
    "writes more output than its limit": prints,
    "fills more than its folder": fill,
    "has a folder where it should not, or none where it should": is_missing_scratch,
}

thread = threading.Thread(target=math.factorial, args=(10,))
thread.start()
thread.join()
done = []
for name, attack in ATTACKS.items():
    try:
        if attack() is not None:
            done.append(name)
    except (OSError, MemoryError):
        pass
print(*done, "end", sep="\\n")
"""
