from __future__ import annotations

import ctypes
import errno
import os
import sys
from fractions import Fraction

import pytest

from qarl.rewards import confined

ARGUMENTS = (0, 0, 0, 0, 0, 0)
PROCESS = 4321

# Numbers of unistd.h for what no program may do, on x86_64 and on aarch64.
REFUSED = {
    "vfork": (58, None),
    "fork": (57, None),
    "clone3": (435, 435),
    "execve": (59, 221),
    "execveat": (322, 281),
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "sendmsg": (46, 211),
    "sendmmsg": (307, 269),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "sched_setaffinity": (203, 122),
    "sched_setscheduler": (144, 119),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchownat": (260, 54),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "mount": (165, 40),
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "open_by_handle_at": (304, 265),
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "semget": (64, 190),
    "io_uring_setup": (425, 425),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "prctl": (157, 167),
    "seccomp": (317, 277),
    "setuid": (105, 146),
    "capset": (126, 91),
    "init_module": (175, 105),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "landlock_restrict_self": (446, 446),
}


def verdict(machine: str, number: int, arguments: tuple[int, ...] = ARGUMENTS, architecture: int | None = None) -> str:
    """What the filter says of one system call: runs it as the kernel does, instruction by instruction."""
    program = confined.filter_program(machine, PROCESS)
    words = {0: number, 4: confined.ARCHITECTURES[machine] if architecture is None else architecture}
    for index, argument in enumerate(arguments):
        words |= {16 + 8 * index: argument & 0xFFFFFFFF, 20 + 8 * index: argument >> 32}
    position = loaded = 0
    while True:
        code, if_true, if_false, operand = program[position]
        position += 1
        match code:
            case confined.LOAD:
                loaded = words[operand]
            case confined.EQUAL:
                position += if_true if loaded == operand else if_false
            case confined.HAS:
                position += if_true if loaded & operand else if_false
            case confined.RETURN:
                return {
                    confined.SECCOMP_ALLOW: "allowed",
                    confined.SECCOMP_ABSENT: "absent",
                    confined.SECCOMP_KILL: "killed",
                }[operand]


@pytest.mark.parametrize("machine", confined.ARCHITECTURES)
@pytest.mark.parametrize("name", REFUSED)
def test_what_reaches_beyond_the_process_is_absent(machine, name):
    number = REFUSED[name][list(confined.ARCHITECTURES).index(machine)]
    if number is not None:
        assert verdict(machine, number) == "absent"


@pytest.mark.parametrize(
    ("machine", "numbers"), [("x86_64", (0, 1, 9, 257, 202, 231)), ("aarch64", (63, 64, 222, 56, 98, 94))]
)
def test_reading_writing_memory_and_threads_are_allowed(machine, numbers):
    assert {verdict(machine, number) for number in numbers} == {"allowed"}


@pytest.mark.parametrize(("machine", "clone"), [("x86_64", 56), ("aarch64", 220)])
def test_a_thread_can_be_made_and_a_process_cannot(machine, clone):
    assert verdict(machine, clone, (0x3D0F00, 0, 0, 0, 0, 0)) == "allowed"  # what glibc makes a thread with
    assert verdict(machine, clone, (0x1200011, 0, 0, 0, 0, 0)) == "absent"  # and a process


@pytest.mark.parametrize(
    ("machine", "kill", "tgkill", "limits"), [("x86_64", 62, 234, 302), ("aarch64", 129, 131, 261)]
)
def test_signals_and_limits_are_the_processes_own(machine, kill, tgkill, limits):
    assert verdict(machine, kill, (PROCESS, 9, 0, 0, 0, 0)) == "allowed"
    assert verdict(machine, tgkill, (PROCESS, 7, 9, 0, 0, 0)) == "allowed"
    assert verdict(machine, limits, (0, 7, 0, 0, 0, 0)) == "allowed"
    for other in (1, PROCESS + 1, 0xFFFFFFFF, (1 << 64) - PROCESS):
        assert verdict(machine, kill, (other, 9, 0, 0, 0, 0)) == "absent"
        assert verdict(machine, tgkill, (other, 7, 9, 0, 0, 0)) == "absent"
        assert verdict(machine, limits, (other, 7, 0, 0, 0, 0)) == "absent"


@pytest.mark.parametrize(("machine", "sendto", "pair"), [("x86_64", 44, 53), ("aarch64", 206, 199)])
def test_only_a_pair_of_sockets_and_nothing_sent_to_an_address(machine, sendto, pair):
    assert verdict(machine, pair, (1, 1, 0, 0, 0, 0)) == "allowed"
    assert verdict(machine, pair, (2, 1, 0, 0, 0, 0)) == "absent"
    assert verdict(machine, sendto, (3, 0, 1, 0, 0, 0)) == "allowed"
    assert verdict(machine, sendto, (3, 0, 1, 0, 0x1000, 16)) == "absent"
    assert verdict(machine, sendto, (3, 0, 1, 0, 0x7F0000000000, 16)) == "absent"  # its lower half is 0


@pytest.mark.parametrize(("machine", "fcntl", "ioctl"), [("x86_64", 72, 16), ("aarch64", 25, 29)])
def test_no_descriptor_sends_signals(machine, fcntl, ioctl):
    assert verdict(machine, fcntl, (3, 4, 0, 0, 0, 0)) == "allowed"  # F_SETFL
    assert verdict(machine, ioctl, (0, 0x5401, 0, 0, 0, 0)) == "allowed"  # TCGETS
    for command in (8, 10, 15):  # F_SETOWN, F_SETSIG, F_SETOWN_EX
        assert verdict(machine, fcntl, (3, command, 0, 0, 0, 0)) == "absent"
    for command in (0x5412, 0x8901):  # TIOCSTI, FIOSETOWN
        assert verdict(machine, ioctl, (0, command, 0, 0, 0, 0)) == "absent"


def test_calls_by_other_numbers_are_not_let_through():
    assert verdict("x86_64", 39, architecture=0x40000003) == "killed"  # 32-bit calls
    assert verdict("x86_64", 0x40000000 + 39) == "absent"  # the x32 calls
    assert verdict("aarch64", 172, architecture=0x40000028) == "killed"


def test_no_number_stands_twice():
    for machine in confined.ARCHITECTURES:
        found = [
            number
            for table in (confined.ALLOWED, confined.BY_ARGUMENT, confined.BEFORE)
            for number in confined.numbers(table, machine).values()
        ]
        assert len(found) == len(set(found))


def test_numbers_of_a_machine_leave_out_what_it_lacks():
    assert confined.numbers("open 2 -, openat 257 56", "x86_64") == {"open": 2, "openat": 257}
    assert confined.numbers("open 2 -, openat 257 56", "aarch64") == {"openat": 56}


def test_a_value_is_written_so_that_types_stay_apart():
    class Text(str):
        __slots__ = ()

    assert confined.portable([1, (True, None), {2.5}, Text("a")]) == {
        "list": [1, {"tuple": [True, None]}, {"set": [2.5]}, "a"]
    }
    assert confined.portable({1: frozenset({b"a"}), "b": 1j}) == {
        "dict": [[1, {"frozenset": [{"bytes": [97]}]}], ["b", {"complex": [0.0, 1.0]}]]
    }
    assert confined.portable(Fraction(1, 2)) == 0.5
    with pytest.raises(TypeError, match="a object cannot be compared"):
        confined.portable(object())


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is part of Linux")
def test_the_version_of_landlock_is_the_kernels():
    library = ctypes.CDLL(None, use_errno=True)
    version = library.syscall(444, None, 0, 1)
    assert confined.landlock_version() == max(version, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="system calls of Linux")
def test_a_call_that_fails_names_itself():
    with pytest.raises(OSError, match="landlock_restrict_self: ") as failed:
        confined.system_call("landlock_restrict_self", 2**31 - 1, 0)
    assert failed.value.errno in (errno.EBADF, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM)


@pytest.mark.skipif(sys.platform != "linux", reason="parents of Linux")
def test_a_program_whose_parent_is_gone_does_not_begin():
    with pytest.raises(ProcessLookupError, match="has ended"):
        confined.end_with_parent(os.getpid())
