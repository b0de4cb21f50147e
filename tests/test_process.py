import os
import subprocess
import sys

import pytest

FAULTS = """
import ctypes, os, resource
from qarl.process import prepare
prepare()
library = ctypes.CDLL(None)
library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
library.free.argtypes = [ctypes.c_void_p]
for repeat in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = library.malloc(64 << 20)
    ctypes.memset(block, 1, 64 << 20)
    library.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before, os.environ.get("GOMP_SPINCOUNT"))
"""
PAGES = (64 << 20) // 4096


def prepared(**environment: str) -> tuple[int, str]:
    """Page faults of touching 64 MiB for the second time in a process that was prepared, and how its threads spin."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GOMP_", "OMP_"))}
    result = subprocess.run(
        [sys.executable, "-c", FAULTS], env=inherited | environment, check=True, capture_output=True, text=True
    )
    faults, spins = result.stdout.split()
    return int(faults), spins


@pytest.mark.skipif(sys.platform != "linux", reason="asks for Linux's page faults and glibc's malloc")
def test_freed_memory_is_kept_unless_the_environment_says_otherwise():
    assert prepared()[0] < PAGES / 10
    assert prepared(MALLOC_MMAP_THRESHOLD_="1048576")[0] > PAGES / 2


def test_idle_threads_sleep_soon_unless_the_environment_says_otherwise():
    assert prepared()[1] == "10000"
    assert prepared(GOMP_SPINCOUNT="7")[1] == "7"
    assert prepared(OMP_WAIT_POLICY="active")[1] == "None"
