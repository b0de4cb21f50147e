from __future__ import annotations

import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qarl.errors import ConfigurationError
from qarl.rewards import confined, sandbox
from qarl.rewards.sandbox import Ended, Job, Limits, SandboxError, prove, run

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or confined.landlock_version() < confined.LANDLOCK_VERSION,
    reason=f"this kernel lacks Landlock of version {confined.LANDLOCK_VERSION} (Linux 6.2)",
)

ATTEMPT = """
def attempt(what):
    try:
        what()
    except OSError as error:
        print("refused", end=" ")
    else:
        print("done", end=" ")
"""


def ran(program: str, stdin: str = "", **limits: object) -> Ended:
    return run(Job((("program.py", program),), stdin=stdin), Limits(**limits))


def printed(program: str, stdin: str = "", **limits: object) -> str:
    """What a program that ends well prints."""
    ended = ran(program, stdin, **limits)
    assert ended.fault is None, ended.errors.decode()
    return ended.output.decode().strip()


def attempts(*expressions: str, setup: str = "", **limits: object) -> list[str]:
    """For each expression, whether it was done or refused by the system."""
    lines = "\n".join(f"attempt(lambda: {expression})" for expression in expressions)
    return printed(f"{ATTEMPT}\n{setup}\n{lines}", **limits).split()


def needs_a_folder() -> None:
    tool = shutil.which("unshare")
    command = [tool or "false", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/tmp"]
    if subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("a file system of one's own (user and mount namespace) is not to be had on this machine")


def test_a_program_reads_its_input_prints_and_is_main():
    program = "import sys\nif __name__ == '__main__':\n    print(sum(map(int, sys.stdin)), sys.argv)"
    assert printed(program, stdin="1\n2\n39\n") == "42 ['program.py']"


def test_a_program_is_alone_in_its_session_and_nowhere():
    assert printed("import os\nprint(os.getcwd(), os.getsid(0) == os.getpid())") == "/ True"


def test_input_larger_than_a_pipe_and_beyond_ascii():
    text = "ä€😀" * 200_000
    assert printed("s = input()\nprint(len(s), s[:3])", stdin=text) == "600000 ä€😀"


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("1 / 0", "ended with status 1"),
        ("def f(:", "ended with status 1"),
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "ended with status -9"),
        ("import os; os.abort()", "ended with status -6"),
        ("def f(): f()\nf()", "ended with status 1"),
        ("'\\ud800' + '\ud800'", "ended with status 1"),
    ],
)
def test_a_program_that_fails_has_its_fault(program, fault):
    assert ran(program).fault == fault


def test_threads_deep_recursion_and_event_loops_work():
    program = """
import asyncio, sys, threading
threading.stack_size(1 << 27)
sys.setrecursionlimit(1 << 20)
def depth(n):
    return 0 if n == 0 else 1 + depth(n - 1)
async def answer():
    await asyncio.sleep(0)
    return 7
def main():
    print(depth(50_000), asyncio.run(answer()))
thread = threading.Thread(target=main)
thread.start()
thread.join()
"""
    assert printed(program) == "50000 7"


def test_a_program_is_compiled_without_what_another_file_asked_for():
    assert printed("def f(x: 1 + 1): pass\nprint(f.__annotations__)") == "{'x': 2}"


def test_hashes_are_the_same_in_every_run():
    assert printed("print(hash('a'))") == printed("print(hash('a'))")


# --- limits


@pytest.mark.parametrize("wait", ["while True: pass", "import time; time.sleep(600)"])
def test_a_program_past_its_time_is_killed_and_gone(wait):
    started = time.monotonic()
    ended = ran(f"import os\nprint(os.getpid(), flush=True)\n{wait}", seconds=1)
    assert ended.fault == "ran longer than 1 s"
    assert time.monotonic() - started < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int(ended.output), 0)


def test_signals_that_a_program_ignores_do_not_keep_it():
    program = (
        "import signal\nfor one in set(signal.Signals) - {9, 19}: signal.signal(one, signal.SIG_IGN)\nwhile True: pass"
    )
    assert ran(program, seconds=0.3).fault == "ran longer than 0.3 s"


def test_threads_left_behind_end_with_the_program():
    program = "import threading, time, os\nprint(os.getpid())\nthreading.Thread(target=time.sleep, args=(600,)).start()"
    ended = ran(program, seconds=1)
    assert ended.fault == "ran longer than 1 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(ended.output), 0)


def test_memory_is_bounded():
    grow = "x = []\nwhile True: x.append(bytearray(1 << 20))"
    ended = ran(grow, memory_bytes=200 << 20)
    assert ended.fault == "ended with status 1"
    assert b"MemoryError" in ended.errors


def test_threads_are_bounded_by_memory():
    bomb = "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    ended = ran(bomb, memory_bytes=256 << 20, seconds=10)
    assert ended.fault == "ended with status 1"
    assert b"can't start new thread" in ended.errors


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_bounded(stream):
    ended = ran(f"import sys\nwhile True: sys.{stream}.write('x' * 1000)", output_bytes=10_000)
    assert ended.fault is not None
    assert len(ended.output) + len(ended.errors) <= 20_000


def test_limits_cannot_be_raised():
    kinds = "RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_CORE"
    raised = "\n".join(
        f"try: resource.setrlimit(resource.{kind}, (-1, -1)); print('raised')\nexcept ValueError: print('kept')"
        for kind in kinds
    )
    assert set(printed(f"import resource\n{raised}").split()) == {"kept"}


def test_open_files_are_bounded():
    program = """
import os
pipes = 0
try:
    while True:
        os.pipe()
        pipes += 1
except OSError as error:
    print(pipes < 32, error.strerror)
"""
    assert printed(program) == "True Too many open files"


def test_the_stack_is_usual_and_may_be_made_larger():
    program = """
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))
print(soft, hard)
"""
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    usual = 8 << 20 if hard == resource.RLIM_INFINITY else min(8 << 20, hard)
    assert printed(program) == f"{usual} {hard}"


# --- files


@pytest.fixture
def secret(tmp_path) -> Path:
    file = tmp_path / "secret"
    file.write_text("secret")
    return file


def test_files_outside_can_be_neither_read_nor_changed(secret):
    path = str(secret)
    before = secret.stat()
    done = attempts(
        f"open({path!r})",
        f"open({path!r}, 'a')",
        f"os.open({path!r}, os.O_RDONLY | os.O_TRUNC)",
        f"os.truncate({path!r}, 0)",
        f"os.remove({path!r})",
        f"os.rename({path!r}, {path + '2'!r})",
        f"os.link({path!r}, {path + '2'!r})",
        f"os.symlink({path!r}, {path + '2'!r})",
        f"os.chmod({path!r}, 0o777)",
        f"os.utime({path!r}, (0, 0))",
        f"os.setxattr({path!r}, 'user.a', b'b')",
        f"open({path + '2'!r}, 'w')",
        f"os.mkdir({path + '2'!r})",
        f"os.mkfifo({path + '2'!r})",
        f"os.listdir({str(secret.parent)!r})",
        setup="import os",
    )
    assert done == ["refused"] * 15
    assert secret.read_text() == "secret"
    assert (secret.stat().st_mode, secret.stat().st_mtime) == (before.st_mode, before.st_mtime)
    assert os.listdir(secret.parent) == ["secret"]


def test_the_home_the_working_folder_and_other_processes_are_closed():
    places = (
        Path.home(),
        Path.cwd(),
        "/",
        "/etc",
        "/root",
        "/home",
        "/tmp",
        "/proc",
        "/proc/self",
        "/sys",
        "/dev",
        "/run",
    )
    assert set(attempts(*(f"os.listdir({str(place)!r})" for place in places), setup="import os")) == {"refused"}
    files = (
        "/etc/passwd",
        f"/proc/{os.getpid()}/environ",
        f"/proc/{os.getpid()}/mem",
        "/proc/self/environ",
        "/proc/1/cmdline",
    )
    assert set(attempts(*(f"open({file!r}, 'rb').read()" for file in files))) == {"refused"}
    links = (f"/proc/{os.getpid()}/cwd", f"/proc/{os.getpid()}/exe", f"/proc/{os.getpid()}/fd/0")
    assert set(attempts(*(f"os.readlink({link!r})" for link in links), setup="import os")) == {"refused"}


def test_no_shared_memory_is_left_behind():
    name = f"sandbox-test-{os.getpid()}"
    done = attempts(
        f"open('/dev/shm/{name}', 'w')",
        f"SharedMemory(name={name!r}, create=True, size=10)",
        "os.memfd_create('a')",
        f"open('/tmp/{name}', 'w')",
        f"open('/var/tmp/{name}', 'w')",
        setup="import os\nfrom multiprocessing.shared_memory import SharedMemory",
    )
    assert done == ["refused"] * 5
    assert not Path("/dev/shm", name).exists()


def test_nothing_can_be_printed_into_devices_but_nowhere():
    assert printed("open('/dev/null', 'w').write('a'); print(len(open('/dev/urandom', 'rb').read(9)))") == "9"


def test_inherited_files_are_closed(secret):
    descriptor = os.open(secret, os.O_RDWR)
    try:
        os.set_inheritable(descriptor, True)
        program = """
import os
def kind(number):
    try:
        return os.readlink(f"/proc/self/fd/{number}"), os.read(number, 10)
    except OSError:
        return None
print([kind(number) for number in range(3, 200) if kind(number)])
"""
        assert "secret" not in printed(program)
    finally:
        os.close(descriptor)


def test_the_environment_is_not_handed_on(monkeypatch):
    monkeypatch.setenv("API_KEY", "secret")
    names = printed("import os\nprint(*sorted(os.environ))").split()
    assert names == sorted(sandbox.ENVIRONMENT)


def test_packages_can_be_imported_where_they_are_named(tmp_path):
    (tmp_path / "useful.py").write_text("answer = 42")
    program = "import useful\nprint(useful.answer)"
    assert b"No module named 'useful'" in ran(program).errors
    assert printed(program, packages=(str(tmp_path),)) == "42"
    assert b"No module named 'pytest'" in ran("import pytest").errors


# --- other processes and the network


def test_no_process_can_be_started():
    done = attempts(
        "os.fork()",
        "os.forkpty()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "subprocess.run(['/bin/true'])",
        "multiprocessing.Process(target=print).start()",
        "os.execv('/bin/true', ['true'])",
        setup="import multiprocessing, os, subprocess",
    )
    assert done == ["refused"] * 6


def test_other_processes_cannot_be_signalled_or_changed():
    parent = os.getpid()
    done = attempts(
        f"os.kill({parent}, 0)",
        "os.kill(os.getppid(), 15)",
        "os.kill(-1, 15)",
        "os.killpg(os.getpgid(0), 0)",
        f"signal.pidfd_send_signal(os.pidfd_open({parent}), 0)",
        f"os.setpriority(os.PRIO_PROCESS, {parent}, 19)",
        f"os.sched_setaffinity({parent}, [0])",
        f"resource.prlimit({parent}, resource.RLIMIT_NOFILE, (0, 0))",
        f"fcntl.fcntl(0, fcntl.F_SETOWN, {parent})",
        setup="import fcntl, os, resource, signal",
    )
    assert done == ["refused"] * 9
    assert os.getpriority(os.PRIO_PROCESS, 0) < 19


def test_no_network_and_no_local_sockets(tmp_path):
    name = f"\0sandbox-test-{os.getpid()}"
    path = str(tmp_path / "socket")
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as named:
        tcp.bind(("127.0.0.1", 0))
        abstract.bind(name)
        named.bind(path)
        for server in (tcp, abstract, named):
            server.listen()
            server.setblocking(False)
        done = attempts(
            f"socket.create_connection({tcp.getsockname()!r})",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
            "socket.socket(socket.AF_INET6)",
            "socket.socket(socket.AF_UNIX)",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            f"pair().connect({name!r})",
            f"pair().connect({path!r})",
            f"pair().sendto(b'a', {name!r})",
            f"pair().sendmsg([b'a'], [], 0, {path!r})",
            "pair().bind('')",
            setup="import socket\npair = lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)[0]",
        )
        assert done == ["refused"] * 10
        for server in (tcp, abstract, named):
            with pytest.raises(BlockingIOError):
                server.accept()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86_64")
def test_native_code_gets_no_further():
    calls = {"fork": 57, "vfork": 58, "clone3": 435, "ptrace": 101, "io_uring_setup": 425, "userfaultfd": 323}
    calls |= {"x32 fork": 0x40000000 + 57, "unshare": 272, "setuid": 105, "process_vm_readv": 310, "bpf": 321}
    program = f"""
import ctypes, errno
call = ctypes.CDLL(None, use_errno=True).syscall
for number in {list(calls.values())}:
    print(call(number, 0, 0, 0, 0, 0, 0), ctypes.get_errno() == errno.ENOSYS)
"""
    assert printed(program).split() == ["-1", "True"] * len(calls)


def test_root_has_no_powers_inside():
    assert (
        attempts("os.setuid(1)", "os.chroot('/')", "os.mknod('/dev/x')", "os.setgroups([])", setup="import os")
        == ["refused"] * 4
    )


def test_a_program_ends_with_the_process_that_waits_for_it():
    trainer = os.fork()
    if trainer == 0:
        run(Job((("program.py", "import time\ntime.sleep(600)"),)), Limits(seconds=600))
        os._exit(0)
    children = Path(f"/proc/{trainer}/task/{trainer}/children")
    try:
        program = int(eventually(children.read_text))
        status = Path(f"/proc/{program}/status")
        eventually(lambda: "Seccomp:\t2" in status.read_text())
        assert "CapPrm:\t0000000000000000\nCapEff:\t0000000000000000" in status.read_text()
    finally:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
    eventually(
        lambda: not Path(f"/proc/{program}").exists() or "State:\tZ" in Path(f"/proc/{program}/status").read_text()
    )


def test_a_wait_that_is_interrupted_leaves_nothing(monkeypatch):
    ready = sandbox._is_ready

    def interrupted(descriptor: int, seconds: float) -> bool:
        if seconds == 600:
            raise KeyboardInterrupt
        return ready(descriptor, seconds)

    monkeypatch.setattr(sandbox, "_is_ready", interrupted)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        ran("import time\ntime.sleep(20)", seconds=600)
    assert time.monotonic() - started < 10


def eventually(question):
    for _ in range(1000):
        if answer := question():
            return answer
        time.sleep(0.01)
    raise AssertionError("it did not come about in 10 seconds")


# --- a folder of its own


def test_a_folder_of_its_own_is_writable_bounded_and_gone():
    needs_a_folder()
    name = f"sandbox-test-{os.getpid()}"
    program = f"""
import os, tempfile
with open("{name}", "w") as file:
    file.write("a")
os.symlink("/etc/passwd", "link")
os.mkdir("folder")
print(os.getcwd(), sorted(os.listdir()), tempfile.gettempdir(), open("{name}").read())
try:
    open("link").read()
except OSError:
    print("refused")
try:
    with open("large", "wb") as file:
        for _ in range(3 << 10):
            file.write(bytes(1024))
except OSError as error:
    print(error.strerror)
try:
    for number in range(2000):
        open(str(number), "w").close()
except OSError as error:
    print(error.strerror)
"""
    lines = printed(program, scratch_bytes=2 << 20, output_bytes=1000).splitlines()
    assert lines[0] == f"/tmp ['folder', 'link', '{name}'] /tmp a"
    assert lines[1] == "refused"
    assert lines[2] in ("No space left on device", "File too large")
    assert lines[3] == "No space left on device"
    assert not Path("/tmp", name).exists()


def test_output_is_bounded_where_files_may_be_larger():
    needs_a_folder()
    ended = ran("print('x' * 2000)", output_bytes=1000, scratch_bytes=1 << 20)
    assert (ended.fault, len(ended.output)) == ("wrote too much", 1000)


def test_a_folder_does_not_open_the_rest(secret):
    needs_a_folder()
    done = attempts(
        f"open({str(secret)!r})",
        "open('/etc/passwd')",
        "os.listdir('/')",
        "os.fork()",
        "socket.socket()",
        f"os.kill({os.getpid()}, 0)",
        "ctypes.CDLL(None, use_errno=True).umount(b'/tmp') and os.listdir('/')",
        setup="import ctypes, os, socket",
        scratch_bytes=1 << 20,
    )
    assert done == ["refused"] * 7
    assert secret.read_text() == "secret"


# --- what is not the program's fault


def test_a_sandbox_that_does_not_start_says_nothing_about_the_program(monkeypatch):
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(SandboxError, match="the sandbox did not start: it said nothing"):
        ran("print(1)")


def test_a_program_cannot_pretend_that_the_sandbox_did_not_start():
    program = """
import os
for number in range(3, 64):
    try:
        os.write(number, b"x" * 100)
        os.ftruncate(number, 0)
        os.close(number)
    except OSError:
        pass
os._exit(1)
"""
    assert ran(program).fault == "ended with status 1"


def test_this_machine_holds():
    prove(Limits())
    prove(Limits(memory_bytes=300 << 20, output_bytes=5000))


def test_this_machine_holds_with_a_folder():
    needs_a_folder()
    prove(Limits(scratch_bytes=1 << 20))


@pytest.mark.parametrize(
    ("line", "attacks"),
    [
        ("    restrict_files(readable, ", ["reads files", "writes files", "creates files", "lists folders"]),
        ("    restrict_calls()", ["makes sockets", "starts processes", "sends signals", "changes the rights of files"]),
        ("    limit_resources(job)", ["takes more memory than its limit", "writes more output than its limit"]),
    ],
)
def test_a_protection_that_does_not_hold_is_found(line, attacks, monkeypatch, tmp_path):
    lines = Path(confined.__file__).read_text().splitlines(keepends=True)
    [number] = [number for number, text in enumerate(lines) if text.startswith(line)]
    weak = tmp_path / "weak.py"
    weak.write_text("".join(lines[:number] + lines[number + 1 :]))
    monkeypatch.setattr(confined, "__file__", str(weak))
    with pytest.raises(ConfigurationError, match="the sandbox does not hold: a program in it ") as refused:
        prove.__wrapped__(Limits())
    assert [attack for attack in attacks if attack not in str(refused.value)] == []
    assert "\n" not in str(refused.value)


def test_a_kernel_without_landlock_is_named(monkeypatch, tmp_path):
    weak = tmp_path / "weak.py"
    text = Path(confined.__file__).read_text()
    weak.write_text(text.replace("version = landlock_version()", "version = 0"))
    monkeypatch.setattr(confined, "__file__", str(weak))
    with pytest.raises(ConfigurationError, match=r"Landlock has version 0 .* and 3 is needed; it needs Linux 6.2"):
        prove.__wrapped__(Limits())


def test_other_systems_are_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(ConfigurationError, match=r"does not work on Linux with riscv64: it needs Linux 6\.2"):
        prove.__wrapped__(Limits())
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(ConfigurationError, match="does not work on Darwin"):
        prove.__wrapped__(Limits())


def test_too_little_memory_for_python_is_named():
    with pytest.raises(ConfigurationError, match="raise memory_mb"):
        prove.__wrapped__(Limits(memory_bytes=8 << 20))


def test_a_probe_that_does_not_come_to_its_end_proves_nothing(monkeypatch):
    monkeypatch.setattr(sandbox, "PROBE", "print('reads files')")
    with pytest.raises(
        ConfigurationError, match=r"cannot run a harmless program \(it stopped in the middle: 'reads files'"
    ):
        prove.__wrapped__(Limits())


def test_packages_that_a_folder_would_hide_are_refused():
    with pytest.raises(ConfigurationError, match="packages /tmp/a: with scratch_mb a program sees a /tmp of its own"):
        prove(Limits(scratch_bytes=1 << 20, packages=("/tmp/a",)))
