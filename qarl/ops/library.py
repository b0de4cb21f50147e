"""Build the C kernels on first use and keep them in a cache keyed by source, flags, compiler and CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).with_name("csrc")
SOURCES = tuple(sorted(FOLDER.glob("*.c")))
HEADERS = tuple(sorted(FOLDER.glob("*.h")))
FLAGS = (
    "-O3",
    "-march=native",
    "-fopenmp",
    "-shared",
    "-fPIC",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",
)
"""No -ffast-math, which would let the compiler reorder reductions, and no fusing of products and sums of its own."""


C_TYPES: dict[str, type] = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
"""What the kernels take, pointers aside."""

MEMBERS: dict[type, str] = {
    ctypes.c_void_p: "pointer",
    ctypes.c_int: "integer",
    ctypes.c_int64: "integer",
    ctypes.c_float: "number",
}
"""The member of a runner's arguments that holds each type; integers widen and narrow unchanged."""


@dataclass(frozen=True, slots=True)
class Build:
    """Where the library is, or why there is none."""

    path: Path | None
    compiler: str | None
    reason: str


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/qarl`, by default `~/.cache/qarl`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "qarl"


def find_compiler() -> str | None:
    """The C compiler: `$CC` when set, else the first of cc, gcc, clang on the path."""
    candidates = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    return next((found for name in candidates if (found := shutil.which(name))), None)


def cpu_identity() -> str:
    """What `-march=native` depends on: the architecture and the processor's model and feature flags."""
    lines: list[str] = []
    info = Path("/proc/cpuinfo")
    if info.exists():
        wanted = ("model name", "flags", "Features")
        lines = [line for line in info.read_text().splitlines() if line.startswith(wanted)][:2]
    return "\n".join([platform.machine(), platform.processor(), *lines])


def build() -> Build:
    """Compile the sources unless the cache holds this very build; never raises for a missing or failing compiler."""
    compiler = find_compiler()
    if compiler is None:
        return Build(None, None, f"no C compiler found (looked for {os.environ.get('CC') or 'cc, gcc, clang'})")
    try:
        return _compile(compiler, library_path(compiler))
    except OSError as error:
        return Build(None, compiler, f"cannot build the kernels: {error}")


def library_path(compiler: str) -> Path:
    """Where the cache keeps what this compiler makes of the sources, with these flags, on this CPU."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    texts = [*(source.read_text() for source in (*HEADERS, *SOURCES)), runners()]
    key = "\n".join([*texts, *FLAGS, compiler, version, cpu_identity()])
    return cache_folder() / f"kernels-{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


@cache
def built() -> Build:
    """The build of this process, made once; one that this process cannot load counts as none."""
    found = build()
    if found.path is None:
        return found
    try:
        ctypes.CDLL(str(found.path))
    except OSError as error:
        return Build(None, found.compiler, f"cannot load {found.path}: {error}")
    return found


@cache
def load() -> ctypes.CDLL | None:
    """The kernels, or None when there are none (`built().reason` says why)."""
    path = built().path
    return open_library(path) if path else None


def open_library(path: Path) -> ctypes.CDLL:
    """The library at `path`, its functions with the argument types that their sources declare."""
    library = ctypes.CDLL(str(path))
    for source in SOURCES:
        for name, types in prototypes(source.read_text()).items():
            getattr(library, name).argtypes = types
    return library


def prototypes(source: str) -> dict[str, list[type]]:
    """Argument types of the public functions (`qarl_...`) that a C source defines."""
    return {name: [c_type(argument) for argument in arguments] for _, name, arguments in definitions(source)}


def definitions(source: str) -> list[tuple[str, str, list[str]]]:
    """Result type, name and declared arguments of every public function."""
    found = re.findall(r"^(\w+) (qarl_\w+)\(([^)]*)\) \{", source, re.MULTILINE)
    return [
        (result, name, [argument.strip() for argument in declared.split(",") if argument.strip() != "void"])
        for result, name, declared in found
    ]


def c_type(argument: str) -> type:
    """What ctypes calls the type of a declared argument."""
    return ctypes.c_void_p if "*" in argument else C_TYPES[argument.split()[0]]


def runners() -> str:
    """C source of a `run_qarl_...` for every kernel that gives nothing back, with its arguments in an array of 8 bytes
    each: so `replay.c` can call them all."""
    lines = ["#include <stdint.h>", "typedef union { void *pointer; int64_t integer; float number; } argument;"]
    for source in SOURCES:
        for result, name, arguments in definitions(source.read_text()):
            if result == "void":
                given = ", ".join(f"a[{i}].{MEMBERS[c_type(argument)]}" for i, argument in enumerate(arguments))
                lines.append(f"void {name}({', '.join(arguments)});")
                lines.append(f"void run_{name}(const argument *a) {{ {name}({given}); }}")
    return "\n".join([*lines, ""])


def _compile(compiler: str, path: Path) -> Build:
    if path.exists():
        return Build(path, compiler, "from cache")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        target, generated = Path(scratch) / path.name, Path(scratch) / "runners.c"
        generated.write_text(runners())
        command = [compiler, *FLAGS, "-o", str(target), *map(str, SOURCES), str(generated), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            return Build(None, compiler, f"{' '.join(command)} failed: {result.stderr.strip()[:500]}")
        os.replace(target, path)  # atomic: another process never loads half a library
    return Build(path, compiler, "compiled")
