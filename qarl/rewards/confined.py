"""Runs one program under protections that it cannot lift. Standard library only.

`sandbox.py` starts this file as a script, `python -s -S -P confined.py JOB STATUS REPORT`, with three file
descriptors: a marshalled dictionary (see `main`), a pipe that gets `STARTED` once every protection holds, and a file
for what the program's tests gave.

The process stays one process: a filter of system calls lets it make threads but no other process, no socket, no
signal to anybody else. Landlock lets it read the Python installation and nothing else. Neither needs a privilege, and
neither can be lifted.
"""

from __future__ import annotations

import ctypes
import errno
import marshal
import os
import resource
import struct
import sys
from types import ModuleType

TYPE_CHECKING = False
"""As of `typing`, which takes as long to import as everything else together."""
if TYPE_CHECKING:
    from typing import Any

STARTED = b"started"

FOLDER = "/tmp"
"""Where a program with `scratch_bytes` may write: a file system in memory, of its own, that ends with it."""

READABLE = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

MOST_OPEN_FILES = 64
MOST_FILES = 1000
STACK_BYTES = 8 << 20

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""linux/audit.h."""

ALLOWED = """
read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
close 3 57, close_range 436 436, lseek 8 62, open 2 -, openat 257 56, stat 4 -, lstat 6 -, fstat 5 80,
newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439, readlink 89 -,
readlinkat 267 78, getcwd 79 17, chdir 80 49, getdents 78 -, getdents64 217 61, statfs 137 43, fstatfs 138 44,
dup 32 23, dup2 33 -, dup3 292 24, fadvise64 221 223, flock 73 32, fsync 74 82, fdatasync 75 83, sendfile 40 71,
copy_file_range 326 285, fallocate 285 47, creat 85 -, truncate 76 45, ftruncate 77 46, mkdir 83 -, mkdirat 258 34,
rmdir 84 -, unlink 87 -, unlinkat 263 35, rename 82 -, renameat 264 38, renameat2 316 276, symlink 88 -,
symlinkat 266 36, link 86 -, linkat 265 37, umask 95 166,
pipe 22 -, pipe2 293 59, poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, epoll_create1 291 20,
epoll_ctl 233 21, epoll_wait 232 -, epoll_pwait 281 22, eventfd2 290 19, recvfrom 45 207, shutdown 48 210,
getsockopt 55 209, getsockname 51 204, getpeername 52 205,
mmap 9 222, munmap 11 215, mremap 25 216, mprotect 10 226, madvise 28 233, brk 12 214,
futex 202 98, set_robust_list 273 99, rseq 334 293, set_tid_address 218 96, arch_prctl 158 -, sched_yield 24 124,
sched_getaffinity 204 123, getcpu 309 168, gettid 186 178, getpid 39 172, getppid 110 173, getpgrp 111 -,
getpgid 121 155, getsid 124 156, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
getresuid 118 148, getresgid 120 150, getgroups 115 158, membarrier 324 283, exit 60 93, exit_group 231 94,
restart_syscall 219 128, getrusage 98 165, getrlimit 97 163, setrlimit 160 164, sysinfo 99 179, uname 63 160,
getrandom 318 278,
rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigsuspend 130 133,
rt_sigtimedwait 128 137, sigaltstack 131 132, alarm 37 -, pause 34 -, setitimer 38 103, getitimer 36 102,
timer_create 222 107, timer_settime 223 110, timer_gettime 224 108, timer_delete 226 111, timerfd_create 283 85,
timerfd_settime 286 86, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115, nanosleep 35 101,
gettimeofday 96 169, time 201 -, times 100 153
"""
"""System calls that a program may make: name, number on x86_64, number on aarch64 (- where there is none)."""

BY_ARGUMENT = """
clone 56 220, sendto 44 206, kill 62 129, tgkill 234 131, fcntl 72 25, ioctl 16 29, prlimit64 302 261, socketpair 53 199
"""
"""As above, but allowed with some arguments only: see `filter_program`."""

BEFORE = """
prctl 157 167, unshare 272 97, mount 165 40, capset 126 91, landlock_create_ruleset 444 444, landlock_add_rule 445 445,
landlock_restrict_self 446 446
"""
"""System calls that are needed to confine, and then given up."""

FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 1030)
"""Duplicate, flags, locks. Not F_SETOWN and F_SETSIG, by which another process could be sent a signal."""

IOCTL_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, TCGETS2: what opening and asking a file needs."""

CLONE_THREAD, CLONE_NEWNS, CLONE_NEWUSER = 0x10000, 0x20000, 0x10000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
SIGKILL = 9
CAPABILITY_VERSION = 0x20080522
"""Numbers of the kernel's headers."""

FS_WRITE_FILE, FS_READ_FILE, FS_READ_DIR, FS_TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
FS_IN_A_FOLDER = FS_WRITE_FILE | FS_READ_FILE | FS_READ_DIR | FS_TRUNCATE | sum(1 << n for n in (4, 5, 7, 8, 12))
"""Remove and make folders, files and links; no devices, sockets or pipes."""
FS_EVERYTHING = (1 << 15) - 1
LANDLOCK_VERSION = 3
"""linux/landlock.h: what version 3 knows. Before it, a file that cannot be written can still be emptied."""

LOAD, EQUAL, HAS, RETURN = 0x20, 0x15, 0x45, 0x06
SECCOMP_ALLOW, SECCOMP_KILL = 0x7FFF0000, 0x80000000
SECCOMP_ABSENT = 0x00050000 | errno.ENOSYS
"""linux/bpf_common.h and linux/seccomp.h. What is not allowed looks as if the kernel lacked it: libraries then do
without, where they can."""

Instruction = tuple[int, int, int, int]


def main() -> None:
    """Read the job, confine this process, run the job's program.

    The job: `parent` (process id), `seconds`, `memory_bytes`, `output_bytes`, `scratch_bytes`, `packages` (folders);
    `module` (the program's `__name__`), `sources` (pairs of title and text, run in order in one namespace), and what
    is reported afterwards: `token`, or the values of `expressions` (with `arguments`), or nothing.
    """
    job_fd, status_fd, report_fd = (int(argument) for argument in sys.argv[1:])
    with open(job_fd, "rb") as file:
        job = marshal.load(file)
    sys.path += job["packages"]
    confine(job)
    os.write(status_fd, STARTED)
    os.close(status_fd)
    run(job, report_fd)


def confine(job: dict[str, Any]) -> None:
    """Give up whatever the program does not need; OSError where the kernel cannot take it."""
    readable = [*sys.path, os.path.join(sys.base_prefix, "lib"), os.path.join(sys.base_exec_prefix, "lib"), *READABLE]
    if job["scratch_bytes"]:
        make_folder(job["scratch_bytes"])
    drop_capabilities()
    end_with_parent(job["parent"])
    system_call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)
    system_call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    restrict_files(readable, [FOLDER] if job["scratch_bytes"] else [])
    restrict_calls()
    # Last, so that a limit that is too small ends the program and not its confinement.
    limit_resources(job)


def run(job: dict[str, Any], report_fd: int) -> None:
    """Run the sources; what they raise ends this process as it would end any."""
    sys.argv = ["program.py"]
    module = sys.modules[job["module"]] = ModuleType(job["module"])
    for title, text in job["sources"]:
        exec(compile(text, title, "exec", dont_inherit=True), vars(module))
    if job["expressions"]:
        codes = [compile(expression, "test", "eval", dont_inherit=True) for expression in job["expressions"]]
        # Each value is written down before the next expression can change it.
        finish(report_fd, [portable(eval(code, vars(module), {"arguments": job["arguments"]})) for code in codes])
    elif job["token"] is not None:
        finish(report_fd, job["token"])


def finish(report_fd: int, answer: Any) -> None:
    """Report, and end without waiting for threads or exit handlers of the program."""
    import json

    left = json.dumps(answer).encode()
    while left:
        left = left[os.write(report_fd, left) :]
    os._exit(0)


def portable(value: Any) -> Any:
    """A value of built-in types as JSON that keeps them apart: a tuple is {"tuple": [...]}; TypeError for others."""
    for scalar in (bool, int, float, str):
        if isinstance(value, scalar):
            return scalar(value)
    if value is None:
        return None
    if isinstance(value, dict):
        return {"dict": [[portable(key), portable(item)] for key, item in value.items()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": list(value)}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for several in (list, tuple, set, frozenset):
        if isinstance(value, several):
            return {several.__name__: [portable(item) for item in value]}
    if hasattr(type(value), "__index__"):
        return int(value)
    if hasattr(type(value), "__float__"):
        return float(value)
    raise TypeError(f"a {type(value).__name__} cannot be compared with a written value")


def limit_resources(job: dict[str, Any]) -> None:
    """Hard limits of the kernel. The time limit is the parent's; the one here is for when it is gone."""
    cpu_seconds = int(job["seconds"] + 1) * (os.cpu_count() or 1) + 1
    for kind, most in (
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, max(job["output_bytes"], job["scratch_bytes"])),
        (resource.RLIMIT_NOFILE, MOST_OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        inherited = resource.getrlimit(kind)[1]
        limit = most if inherited == resource.RLIM_INFINITY else min(most, inherited)
        resource.setrlimit(kind, (limit, limit))
    # What a thread's stack takes by default; a program may ask for more.
    most = resource.getrlimit(resource.RLIMIT_STACK)[1]
    stack = STACK_BYTES if most == resource.RLIM_INFINITY else min(STACK_BYTES, most)
    resource.setrlimit(resource.RLIMIT_STACK, (stack, most))


def make_folder(size: int) -> None:
    """Mount an empty file system of that many bytes on `FOLDER`, which this process alone sees, and go there."""
    user, group = os.getuid(), os.getgid()
    system_call("unshare", CLONE_NEWUSER | CLONE_NEWNS)
    for name, line in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    kind = ctypes.create_string_buffer(b"tmpfs")
    place = ctypes.create_string_buffer(FOLDER.encode())
    options = ctypes.create_string_buffer(f"size={size},nr_inodes={MOST_FILES},mode=700".encode())
    flags = MS_NOSUID | MS_NODEV | MS_NOEXEC
    system_call("mount", *map(ctypes.addressof, (kind, place, kind)), flags, ctypes.addressof(options))
    os.chdir(FOLDER)


def drop_capabilities() -> None:
    """Root keeps its name and loses its powers."""
    header = ctypes.create_string_buffer(struct.pack("Ii", CAPABILITY_VERSION, 0))
    nothing = ctypes.create_string_buffer(24)
    system_call("capset", ctypes.addressof(header), ctypes.addressof(nothing))


def end_with_parent(parent: int) -> None:
    """Be killed when the process that waits for this one ends, however it ends."""
    system_call("prctl", PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise ProcessLookupError("the process that asked for this program has ended")


def restrict_files(readable: list[str], writable: list[str]) -> None:
    """Landlock: what lies below `readable` can be read, below `writable` written; nothing else can be opened."""
    version = landlock_version()
    if version < LANDLOCK_VERSION:
        raise OSError(errno.ENOSYS, f"Landlock has version {version} (0: none) and {LANDLOCK_VERSION} is needed")
    handled = ctypes.create_string_buffer(struct.pack("Q", FS_EVERYTHING))
    rules = system_call("landlock_create_ruleset", ctypes.addressof(handled), 8, 0)
    for path in readable:
        _permit(rules, path, FS_READ_FILE | FS_READ_DIR)
    for path in DEVICES:
        _permit(rules, path, FS_READ_FILE | FS_WRITE_FILE | FS_TRUNCATE)
    for path in writable:
        _permit(rules, path, FS_IN_A_FOLDER)
    system_call("landlock_restrict_self", rules, 0)
    os.close(rules)


def landlock_version() -> int:
    """Of the running kernel; 0 where it has none, or has it switched off."""
    try:
        return system_call("landlock_create_ruleset", 0, 0, 1)
    except OSError:
        return 0


def _permit(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # not every machine has every place
    if not os.path.isdir(path):
        rights &= ~FS_READ_DIR
    rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place))
    system_call("landlock_add_rule", rules, 1, ctypes.addressof(rule), 0)
    os.close(place)


def restrict_calls() -> None:
    """Seccomp: from here on, only the allowed system calls."""
    program = filter_program(os.uname().machine, os.getpid())
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code)))
    system_call("prctl", PR_SET_SECCOMP, 2, ctypes.addressof(header), 0, 0)


def filter_program(machine: str, process: int) -> list[Instruction]:
    """The filter, for the kernel's machine of four-part instructions: code, jump if true, jump if false, operand."""
    number = numbers(BY_ARGUMENT, machine)
    conditions = {
        "clone": [_load(0), (HAS, 0, 1, CLONE_THREAD), _ALLOW],
        # Without an address: `send` on a connected pair, which leads to nobody else.
        "sendto": [_load(4), (EQUAL, 0, 3, 0), _load(4, high=True), (EQUAL, 0, 1, 0), _ALLOW],
        "kill": _one_of(0, process),
        "tgkill": _one_of(0, process),
        "fcntl": _one_of(1, *FCNTL_COMMANDS),
        "ioctl": _one_of(1, *IOCTL_COMMANDS),
        "prlimit64": _one_of(0, 0),
        "socketpair": _one_of(0, 1),
    }
    program: list[Instruction] = [
        (LOAD, 0, 0, 4),
        (EQUAL, 1, 0, ARCHITECTURES[machine]),
        (RETURN, 0, 0, SECCOMP_KILL),
        (LOAD, 0, 0, 0),
    ]
    for allowed in numbers(ALLOWED, machine).values():
        program += [(EQUAL, 0, 1, allowed), _ALLOW]
    for name, condition in conditions.items():
        body = [*condition, _ABSENT]
        program += [(EQUAL, 0, len(body), number[name]), *body]
    return [*program, _ABSENT]


_ALLOW: Instruction = (RETURN, 0, 0, SECCOMP_ALLOW)
_ABSENT: Instruction = (RETURN, 0, 0, SECCOMP_ABSENT)


def _load(argument: int, high: bool = False) -> Instruction:
    return (LOAD, 0, 0, 16 + 8 * argument + 4 * high)


def _one_of(argument: int, *values: int) -> list[Instruction]:
    tests = [((EQUAL, 0, 1, value), _ALLOW) for value in values]
    return [_load(argument), *(instruction for test in tests for instruction in test)]


def numbers(table: str, machine: str) -> dict[str, int]:
    """Names and numbers of a table's system calls, of those that the machine has."""
    column = 1 + list(ARCHITECTURES).index(machine)
    entries = (entry.split() for entry in table.split(","))
    return {entry[0]: int(entry[column]) for entry in entries if entry[column] != "-"}


def system_call(name: str, *arguments: int) -> int:
    """One of the calls of `BEFORE`; OSError that names it where it fails."""
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    number = numbers(BEFORE, os.uname().machine)[name]
    result: int = function(*(ctypes.c_long(argument) for argument in (number, *arguments)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


if __name__ == "__main__":
    main()
