"""The kernels together: a rollout and an update with them, and that they compile for GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qarl.ops.device import has_triton
from qarl.ops.kernels import integers_are_exact, using
from qarl.ops.reference import ReferenceKernels
from qarl.records import Sampling

SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}
"""Bytes that one program can have (CUDA programming guide, table of compute capabilities)."""


@pytest.mark.triton
@pytest.mark.parametrize("scheme", ["none", "w8a8-int8", "w4a16", "fp8", "fp8-block"])
def test_engine_and_learner_have_the_same_bits(small: Any, triton_kernels: ReferenceKernels, scheme):
    small = replace(small, sampling=Sampling(temperature=0.8, max_new_tokens=4))
    with using(triton_kernels):
        learner = small.learner(scheme)
        groups = small.rollout(learner, 5, 36, group_size=2)
        report = learner.update(groups, small.advantages(groups))
    assert report["mismatch/bit_equal"].value() == 1.0
    assert report["optim/grad_norm"].value() > 0.0


@pytest.mark.triton
def test_an_update_is_that_of_the_reference(small: Any, triton_kernels: ReferenceKernels):
    small, norms = replace(small, sampling=Sampling(temperature=0.8, max_new_tokens=4)), []
    for kernels in (triton_kernels, ReferenceKernels()):
        with using(kernels):
            learner = small.learner("w4a16")
            groups = small.rollout(learner, 5, 36, group_size=2)
            norms.append(learner.update(groups, small.advantages(groups))["optim/grad_norm"].value())
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.triton
def test_the_integer_gemms_are_exact(triton_kernels: ReferenceKernels):
    assert integers_are_exact(triton_kernels)


def test_tensors_are_handed_over_aligned():
    kernels = pytest.importorskip("qarl.ops.triton.kernels")
    storage = torch.arange(64.0)
    for view in (storage[1:33], storage.view(8, 8)[:, 2:4]):
        given = kernels.whole(view)
        assert given.is_contiguous() and given.data_ptr() % kernels.ALIGNMENT == 0 and torch.equal(given, view)
    assert kernels.whole(storage) is storage and kernels.whole(None) is None


def test_queries_of_a_decode_step_have_programs_of_their_own():
    kernels = pytest.importorskip("qarl.ops.triton.kernels")
    sizes = {"TILE": 16, "GROUP": 4}

    class Layout:
        pointers = torch.arange(6)

    assert kernels.queries_per_tile(Layout(), 5, sizes) == 1
    assert kernels.queries_per_tile(Layout(), 6, sizes) == 4


@pytest.mark.triton
def test_every_kernel_compiles_for_gpus_and_fits_them():
    """No GPU is needed. Nothing is fused: that would be a freedom of the compiler's to change bits."""
    if not has_triton():
        pytest.skip("no Triton here: pip install 'qarl-llm[gpu]'")
    command = [sys.executable, str(Path(__file__).with_name("compiling.py")), *map(str, SHARED_MEMORY)]
    root = str(Path(__file__).parents[3])
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    said = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=900)
    assert said.returncode == 0, said.stderr[-2000:]
    found = [json.loads(line) for line in said.stdout.splitlines()]
    assert {one["capability"] for one in found} == set(SHARED_MEMORY)
    for one in found:
        assert one["shared"] <= SHARED_MEMORY[one["capability"]], one
        assert one["stack"] <= 256, f"registers spill: {one}"
        assert not one["fused"], one
