"""How this process hashes, waits and keeps memory: set once, before anything heavy is imported.

What the environment says about waiting and memory is left alone.
"""

from __future__ import annotations

import ctypes
import os
import sys

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""glibc's malloc.h."""

SAYS_HOW_TO_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"}
"""Names in the environment."""


def prepare() -> None:
    """Share the cores with others, and keep freed memory."""
    _share_cores()
    _keep_memory()


def hash_alike() -> None:
    """Start the interpreter again with the same arguments and PYTHONHASHSEED=0, where hashes of texts are random.

    For a program's first line: what was done before it is done again. Sets of texts are otherwise in another order in
    every process, and generators of questions that pick from one would ask others when a run is resumed.
    """
    # Once at most: python -E and -I do not read the environment, and -R not this part of it.
    if not sys.flags.hash_randomization or os.environ.get("PYTHONHASHSEED") == "0":
        return
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _share_cores() -> None:
    """Let idle OpenMP threads sleep after about half a millisecond, before anything loads OpenMP.

    By default they spin for milliseconds, which on a machine with other work makes every parallel region wait for the
    scheduler: tens of times slower.
    """
    if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
        os.environ["GOMP_SPINCOUNT"] = "10000"


def _keep_memory() -> None:
    """Keep freed blocks for the next step, where the C library can be asked to.

    glibc gives large ones back to the system, which clears them page by page when the next step asks for as many: a
    tenth of a step.
    """
    if sys.platform != "linux" or os.environ.keys() & SAYS_HOW_TO_KEEP_MEMORY:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # musl's C library has none
    if mallopt is None:
        return
    if not mallopt(M_MMAP_THRESHOLD, 256 << 20):
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most that glibc before 2.35 takes
    mallopt(M_TRIM_THRESHOLD, 1 << 30)
