import os
import platform
import subprocess
import sys

import pytest

BYTES = 64 << 20
TWICE = """
import ctypes, os, resource, sys
if sys.argv[1] == "prepared":
    from qarl.process import prepare
    prepare()
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
for repeat in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc(int(sys.argv[2]))
    ctypes.memset(block, 1, int(sys.argv[2]))
    library.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, os.environ.get("GOMP_SPINCOUNT"))
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks how glibc's malloc keeps memory")


def run(how: str = "prepared", **environment: str) -> tuple[int, str]:
    """Page faults of touching 64 MiB for the second time, and how idle threads spin."""
    says = ("MALLOC_", "GLIBC_TUNABLES", "GOMP_", "OMP_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(says)}
    command = [sys.executable, "-c", TWICE, how, str(BYTES)]
    result = subprocess.run(command, env=inherited | environment, check=True, capture_output=True, text=True)
    faults, spins = result.stdout.split()
    return int(faults), spins


HASH = """
import sys
from qarl.process import hash_alike
hash_alike()
print(hash("order"), sys.argv[1:], sys.stdin.read(), sys.flags.hash_randomization)
"""


@pytest.mark.parametrize("options", [(), ("-I",), ("-E",), ("-R",)], ids=str)
def test_texts_hash_alike_in_every_process_unless_python_is_told_to_ignore_it(options: tuple[str, ...]) -> None:
    said = set()
    for seed in ("1", "2", "random", None):
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        environment |= {} if seed is None else {"PYTHONHASHSEED": seed}
        code = f"import sys; sys.path[:] = {sys.path!r}\n{HASH}"
        command = [sys.executable, *options, "-c", code, "--x", "y z"]
        result = subprocess.run(command, env=environment, input="typed", check=True, capture_output=True, text=True)
        hashed, _, rest = result.stdout.partition(" ")
        assert rest.startswith("['--x', 'y z'] typed")
        said.add(hashed)
    assert len(said) == (4 if options else 1)


@glibc
def test_freed_memory_is_kept_unless_the_environment_says_otherwise():
    anew = run("as it is")[0]
    if anew < BYTES / os.sysconf("SC_PAGE_SIZE") / 2:
        pytest.skip("the system gives memory in huge pages: faults tell nothing")
    assert run()[0] < anew / 10
    assert run(MALLOC_ARENA_MAX="1")[0] < anew / 10
    assert run(MALLOC_MMAP_THRESHOLD_="1048576")[0] > anew / 2
    assert run(GLIBC_TUNABLES="glibc.malloc.mmap_threshold=1048576")[0] > anew / 2


def test_idle_threads_sleep_soon_unless_the_environment_says_otherwise():
    assert run("as it is")[1] == "None"
    assert run()[1] == "10000"
    assert run(GOMP_SPINCOUNT="7")[1] == "7"
    assert run(OMP_WAIT_POLICY="active")[1] == "None"
