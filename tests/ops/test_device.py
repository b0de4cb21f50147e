"""Where a run computes, and that nothing of it is made anywhere else by accident."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from qarl.errors import ConfigurationError
from qarl.ops import device as module
from qarl.ops.device import HOST, has_triton, missing_for_cuda, moved, place
from qarl.ops.kernels import compute_on, kernels, using
from qarl.ops.reference import ReferenceKernels
from qarl.records import Sampling


def pretend(monkeypatch: pytest.MonkeyPatch, gpu: bool, triton: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(module, "has_triton", lambda: triton)


@pytest.mark.parametrize("gpu", [True, False])
@pytest.mark.parametrize("triton", [True, False])
def test_auto_takes_a_gpu_that_can_be_used_and_says_why_not(monkeypatch: pytest.MonkeyPatch, gpu, triton):
    pretend(monkeypatch, gpu, triton)
    found = place("auto")
    assert found.device.type == ("cuda" if gpu and triton else "cpu")
    assert found.reason == ("a GPU" if gpu and triton else missing_for_cuda())
    assert place("cpu").device == HOST


@pytest.mark.parametrize(("gpu", "reason"), [(False, "GPU"), (True, "qarl-llm\\[gpu\\]")])
def test_cuda_is_refused_where_it_cannot_be_had_with_what_to_do(monkeypatch: pytest.MonkeyPatch, gpu, reason):
    pretend(monkeypatch, gpu, triton=False)
    with pytest.raises(ConfigurationError, match=f"device = 'cuda': .*{reason}.*device = 'cpu'"):
        place("cuda")


def test_kernels_are_those_of_the_device_in_use(monkeypatch: pytest.MonkeyPatch):
    if not has_triton():
        pytest.skip("no Triton here: pip install 'qarl-llm[gpu]'")
    before = kernels()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    try:
        compute_on(torch.device("cuda", 0))
        assert kernels().name == "triton" and kernels().device == torch.device("cuda", 0)
        assert torch.are_deterministic_algorithms_enabled()
        with using(before):
            assert kernels() is before
    finally:
        compute_on(HOST)
    assert kernels() is before and not torch.are_deterministic_algorithms_enabled()


@dataclass(frozen=True)
class Inner:
    rows: Tensor


@dataclass(frozen=True)
class Outer:
    name: str
    tokens: Tensor
    inner: Inner


def test_a_record_moves_with_all_its_tensors_and_stays_on_the_cpu_as_it_is():
    record = Outer("a", torch.ones(2), Inner(torch.ones(3)))
    assert moved(record, HOST) is record
    there = moved(record, torch.device("meta"))
    assert (there.name, there.tokens.device.type, there.inner.rows.device.type) == ("a", "meta", "meta")


@pytest.mark.parametrize("scheme", ["none", "w8a8-int8", "w4a16", "fp8"])
@pytest.mark.parametrize("kind", ["reference", pytest.param("triton", marks=pytest.mark.triton)])
def test_nothing_is_made_on_the_default_device_by_accident(small: Any, request: pytest.FixtureRequest, kind, scheme):
    """Where that is a device without memory, whatever is made without saying where could not be computed with."""
    small = replace(small, sampling=Sampling(temperature=0.8, max_new_tokens=3))
    chosen = ReferenceKernels() if kind == "reference" else request.getfixturevalue("triton_kernels")
    outcomes = []
    for default in (nullcontext(), torch.device("meta")):
        with using(chosen):
            learner, prompts = small.learner(scheme), small.prompts(3, 36)
            engine = small.engine(learner.publish())
            advantages = [torch.tensor([1.0, -1.0, 0.5])] * 2
            with default:
                groups = engine.generate(prompts, 3, small.sampling, (0, 0))
                learner.update(groups, advantages)
                engine.load(learner.publish())
            outcomes.append((groups, learner.publish().checksum))
    (groups, checksum), (others, other_checksum) = outcomes
    assert checksum == other_checksum
    for mine, theirs in zip(groups, others, strict=True):
        for one, other in zip(mine.completions, theirs.completions, strict=True):
            assert torch.equal(one.token_ids, other.token_ids)
            assert torch.equal(one.engine_logprobs, other.engine_logprobs)
