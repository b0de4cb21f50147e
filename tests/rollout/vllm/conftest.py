"""vLLM over the small model, started once for a scheme and a type: that takes the better part of a minute."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from qarl.learner.learner import LocalLearner
from qarl.models.lora import LoraConfig
from qarl.quant import QuantConfig, plan_schemes, scheme_named
from qarl.records import Snapshot
from qarl.rollout.config import VllmEngineConfig
from qarl.rollout.vllm.engine import VllmEngine
from qarl.rollout.vllm.launch import as_served
from qarl.sync.checksum import digests
from tests.conftest import SMALL

CASES = [("none", "float32"), ("w8a8-int8", "bfloat16"), ("w8a8-int8", "float32"), ("w4a16", "bfloat16")]
"""float32 goes through oneDNN, bfloat16 through AMX where there is AMX; 4-bit weights have no kernel for float32."""


@dataclass(eq=False)
class Started:
    """A running vLLM, and versions of the small model's weights for it."""

    scheme: str
    dtype: str
    engine: VllmEngine
    lora: LoraConfig | None = None

    def learner(self, seed: int = 0, **config: Any) -> LocalLearner:
        """With the engine's scheme, scales and head."""
        matrices = SMALL.decoder().matrices()
        plan = plan_schemes(matrices, scheme_named(self.scheme), QuantConfig(rules={"lm_head": "none"}))
        schemes = plan.with_scales_in(getattr(torch, self.dtype)).quantized
        return SMALL.learner(schemes=schemes, seed=seed, lora=self.lora, **config)

    def version(self, number: int) -> Snapshot:
        """Other weights in every version."""
        return dataclasses.replace(self.learner(seed=number).publish(), version=number)


def start(scheme: str, dtype: str, lora: LoraConfig | None = None, **config: Any) -> Started:
    settings = VllmEngineConfig(dtype=dtype, kv_bytes=1 << 26, max_concurrency=32, **config)
    engine = VllmEngine(settings, None, SMALL.config, SMALL.sampleable, 128, str, lora=lora)
    return Started(scheme, dtype, engine, lora)


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def started(request: pytest.FixtureRequest) -> Iterator[Started]:
    found = start(*request.param)
    yield found
    found.engine.close()


@pytest.fixture(scope="module")
def in_full_precision() -> Iterator[Started]:
    """Where vLLM's log-probabilities are those of a reference but for the last bits."""
    found = start("none", "float32")
    found.engine.load(found.version(0))
    yield found
    found.engine.close()


def served_of(snapshot: Snapshot, dtype: torch.dtype) -> Snapshot:
    """A version of the small model as vLLM holds it in this type."""
    return as_served(snapshot, SMALL.sampleable, dtype, digests(snapshot.tensors))[0]
