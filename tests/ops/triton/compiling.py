"""Compile every Triton kernel for GPUs that need not be here, and print what each takes as a line of JSON.

A program of its own: where Triton interprets, it does not compile. Argument: compute capabilities such as 80 or 90.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qarl.ops.triton import attention, gemm, head, rows

INDICES = {"sequences", "visible", "pointers", "starts", "lengths", "order", "ends", "positions", "slots", "targets"}
FLOATS = {"eps", "limit", "scale", "inverse_temperature"}
CODES = {"*i8": ("codes_ptr", "weight_ptr", "keys_ptr", "values_ptr"), "*i16": ("codes_ptr", "weight_ptr")}

TILE = {"BLOCK_M": gemm.BLOCK_M, "BLOCK_N": gemm.BLOCK_N}
CODES_TILE = {**TILE, "BLOCK_K": gemm.CODES_BLOCK_K}
FP32 = {"PRECISION": "tf32x3"}
HEADS = {"REPEAT": 4, "GROUP": 4, "TILE": attention.TILE, "DIM": 128, "BLOCK_DIM": 128}
ODD_HEADS = {"REPEAT": 3, "GROUP": 4, "TILE": attention.TILE, "DIM": 64, "BLOCK_DIM": 64}
ATTENTION = {**FP32, **HEADS, "BLOCK_KEYS": attention.BLOCK_KEYS}
NO_SCALES = {"HAS_SCALES": False, "key_scales_ptr": None, "value_scales_ptr": None}


def cases(capability: int) -> Iterator[tuple[Any, dict[str, Any], str, int]]:
    """Kernel, constants, type of its codes, warps: sizes of an 8B model."""
    for prologue in ("plain", "norm", "gated"):
        yield rows.prepare_kernel, {"PROLOGUE": prologue, "BLOCK": 2048}, "", 4
        yield rows.prepare_quantized_kernel, {"PROLOGUE": prologue, "BLOCK": 2048}, "*i8", 4
    yield rows.rms_norm_backward_kernel, {"BLOCK": 2048}, "", 4
    yield rows.gated_backward_kernel, {"BLOCK": 2048}, "", 4
    yield gemm.matmul_kernel, {**FP32, **TILE, "BLOCK_K": gemm.BLOCK_K}, "", 4
    yield gemm.matmul_int4_kernel, {**FP32, **TILE, "BLOCK_K": gemm.BLOCK_K, "HALF": 64}, "", 4
    yield gemm.matmul_int4_kernel, {**FP32, **TILE, "BLOCK_K": 16, "HALF": 16}, "", 4
    yield gemm.int8_matmul_kernel, CODES_TILE, "*i8", 4
    yield gemm.int12_matmul_kernel, CODES_TILE, "*i16", 4
    if capability >= 89:
        yield gemm.fp8_matmul_kernel, CODES_TILE, "*fp8e4nv", 4
    yield head.token_logprobs_kernel, {"BLOCK": head.BLOCK}, "", 4
    yield head.logits_gradient_kernel, {"BLOCK": head.BLOCK}, "", 4
    yield head.sample_kernel, {"BLOCK": head.BLOCK, "PIECE": head.PIECE}, "", 4
    yield attention.split_rotate_kernel, {"BLOCK": 64, **NO_SCALES}, "", 4
    yield attention.split_rotate_kernel, {"BLOCK": 64, "HAS_SCALES": True}, "*i8", 4
    yield attention.attention_kernel, {**ATTENTION, **NO_SCALES}, "", 4
    yield attention.attention_kernel, {**ATTENTION, **ODD_HEADS, **NO_SCALES}, "", 4
    yield attention.attention_kernel, {**ATTENTION, "HAS_SCALES": True}, "*i8", 4
    yield attention.attention_dq_kernel, ATTENTION, "", 4
    yield attention.attention_dkv_kernel, ATTENTION, "", attention.WARPS_OF_KEYS


def type_of(name: str, codes: str) -> str:
    if not name.endswith("_ptr"):
        return "fp32" if name in FLOATS else "i32"
    if name == "tokens_ptr" or name.removesuffix("_ptr") in INDICES:
        return "*i64"
    if name == "nibbles_ptr":
        return "*u8"
    return codes if codes and name in CODES.get(codes, CODES["*i16"]) else "*fp32"


def compiled(kernel: Any, constants: Mapping[str, Any], codes: str, warps: int, capability: int) -> dict[str, Any]:
    """What the kernel takes: bytes of shared memory, registers of a thread, bytes of its stack (what spills)."""
    names = [parameter.name for parameter in kernel.params]
    signature = {name: "constexpr" if name in constants else type_of(name, codes) for name in names}
    aligned = [name for name in names if signature[name].startswith("*") or name in ("n", "width", "size", "step")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"enable_fp_fusion": False, "num_warps": warps}
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    usage = resource_usage(found.asm["cubin"])
    return {
        "kernel": kernel.__name__,
        "capability": capability,
        "shared": found.metadata.shared,
        "registers": usage["REG"],
        "stack": usage["STACK"],
        "fused": "fma.rn.f32" in found.asm["ptx"],
    }


def resource_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    (line,) = [line for line in said.stdout.splitlines() if "REG:" in line]
    return {name: int(value) for name, value in (part.split(":") for part in line.split() if part.count(":") == 1)}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        for case in cases(int(argument)):
            print(json.dumps(compiled(*case, int(argument))), flush=True)
