"""What every test starts from: one thread, fixed seeds, no network; and a model small enough to train in a blink."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

# Before any tokenizer or hub library is imported: tests read nothing from a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    # Before Triton is imported: without a GPU it interprets the kernels, on tensors of the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from qarl.learner.config import LearnerConfig
from qarl.learner.learner import LocalLearner
from qarl.models.config import ModelConfig
from qarl.models.decoder import Decoder
from qarl.models.names import random_weights
from qarl.models.rope import RopeConfig
from qarl.objectives import Reinforce
from qarl.ops.device import has_triton, moved
from qarl.ops.reference import KVCodes, ReferenceKernels
from qarl.quant import QuantConfig, Scheme, plan_schemes, scheme_named
from qarl.records import Completion, Group, Prompt, Sampling, Snapshot
from qarl.roles import Objective
from qarl.rollout.config import NativeEngineConfig
from qarl.rollout.native import NativeEngine


@pytest.fixture(autouse=True)
def _one_thread_and_fixed_seeds() -> Iterator[None]:
    """Small tensors are quicker on one thread; a test that wants more sets them, and the next one starts afresh."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    yield
    torch.set_num_threads(1)


class FacingTheCpu:
    """Kernels of a GPU for tests that have their tensors on the CPU: they go there, and results come back."""

    device = torch.device("cpu")

    def __init__(self, inner: ReferenceKernels) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            there = [self._there(one) for one in arguments]
            result = found(*there)
            for mine, theirs in zip(arguments, there, strict=True):
                copy_back(mine, theirs)
            return back(result)

        return call

    def _there(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self.inner.device)
        if isinstance(value, tuple | list):
            there = [self._there(one) for one in value]
            return type(value)(*there) if hasattr(value, "_fields") else type(value)(there)
        return moved(value, self.inner.device) if dataclasses.is_dataclass(value) else value


def copy_back(mine: Any, theirs: Any) -> None:
    """What an operation may have written in place."""
    if isinstance(mine, Tensor) and mine.is_floating_point():
        mine.detach().copy_(theirs)
    elif isinstance(mine, list):
        for one, other in zip(mine, theirs, strict=True):
            copy_back(one, other)
    elif isinstance(mine, KVCodes):
        mine.codes.copy_(theirs.codes)
        mine.scales.copy_(theirs.scales)


def back(result: Any) -> Any:
    """Results on the CPU; packed weights stay where they are multiplied."""
    if isinstance(result, Tensor):
        return result.cpu()
    if isinstance(result, tuple):
        here = [back(one) for one in result]
        return type(result)(*here) if hasattr(result, "_fields") else tuple(here)
    return result


@pytest.fixture(scope="session")
def triton_kernels() -> ReferenceKernels:
    """The Triton kernels for tensors on the CPU: interpreted, or where there is a GPU, run there."""
    if not has_triton():
        pytest.skip("no Triton here: pip install 'qarl-llm[gpu]'")
    from qarl.ops.triton.kernels import TritonKernels

    if torch.cuda.is_available():
        return cast(ReferenceKernels, FacingTheCpu(TritonKernels(torch.device("cuda"))))
    return TritonKernels(torch.device("cpu"))


SAMPLING = Sampling(temperature=0.8, max_new_tokens=10, stop_token_ids=(0, 1, 2, 3))


@dataclass(frozen=True)
class Small:
    """A model with random weights, and engines, learners and prompts for it.

    Rows of the vocabulary past `sampleable` are padding. Widths are multiples of 128, so that every scheme fits; a
    page of its key/value cache (32 tokens) is 32768 bytes.
    """

    config: ModelConfig
    sampleable: int = 83
    sampling: Sampling = SAMPLING
    kv: Literal["fp32", "int8"] = "fp32"

    def weights(self, seed: int = 0) -> dict[str, Tensor]:
        """Spread out enough for attention and sampling to have preferences; gains and biases are not trivial."""
        torch.manual_seed(seed)
        weights = random_weights(self.config, seed)
        return {name: 3 * w if w.dim() == 2 else w + 0.1 * torch.randn_like(w) for name, w in weights.items()}

    def decoder(self, seed: int = 0) -> Decoder:
        decoder = Decoder(self.config, self.sampleable, rounds_kv=self.kv == "int8")
        decoder.assign(self.weights(seed), requires_grad=True)
        return decoder

    def learner(
        self,
        scheme: str = "none",
        objective: Objective | None = None,
        alignment: Any = "auto",
        rules: dict[str, str] | None = None,
        seed: int = 0,
        schemes: Mapping[str, Scheme] | None = None,
        **config: Any,
    ) -> LocalLearner:
        """Its rate is high enough for one step to move codes; `schemes` stands for a plan of `scheme` and `rules`."""
        decoder = self.decoder(seed)
        plan = plan_schemes(decoder.matrices(), scheme_named(scheme), QuantConfig(rules=rules or {}))
        return LocalLearner(
            LearnerConfig(**{"lr": 3e-3, **config}),
            decoder,
            objective or Reinforce(),
            plan.quantized if schemes is None else schemes,
            alignment,
            self.sampling.temperature,
            self.sampling.max_new_tokens,
            total_steps=10,
        )

    def engine(self, snapshot: Snapshot | None = None, progress: Any = None, **config: Any) -> NativeEngine:
        """Serves the snapshot; without one, nothing yet."""
        settings = NativeEngineConfig(**{"kv_cache": self.kv, **config})
        engine = NativeEngine(settings, self.config, self.sampleable, str, progress)
        if snapshot is not None:
            engine.load(snapshot)
        return engine

    def prompts(self, *lengths: int) -> list[Prompt]:
        """Random tokens; the same length at the same place is the same prompt."""
        generator = torch.Generator().manual_seed(7)
        tokens = [torch.randint(self.sampleable, (length,), generator=generator).tolist() for length in lengths]
        return [Prompt(f"small/{i}", tuple(ids), "", {}) for i, ids in enumerate(tokens)]

    def rollout(self, learner: LocalLearner, *lengths: int, group_size: int = 3, seed: int = 0) -> list[Group]:
        """Completions of prompts of these lengths by what the learner publishes now."""
        engine = self.engine(learner.publish())
        return engine.generate(self.prompts(*lengths), group_size, self.sampling, (seed, learner.version))

    def predicted(self, decoder: Decoder, prompt: Prompt, completion: Completion) -> Tensor:
        """What the decoder says before each token of a completion, computed as one sequence: logits [T, V]."""
        logits = decoder.full_logits(torch.cat([torch.tensor(prompt.token_ids), completion.token_ids]))
        return logits[len(prompt.token_ids) - 1 : -1]

    def advantages(self, groups: list[Group], seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(len(group.completions), generator=generator) for group in groups]


SMALL = Small(
    ModelConfig(
        family="llama",
        vocab_size=96,
        hidden_size=128,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        rope=RopeConfig(),
        tie_embeddings=True,
    )
)


@pytest.fixture
def small() -> Small:
    """A Llama of two layers with a tied head."""
    return SMALL
