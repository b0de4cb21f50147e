"""What a user chooses about the rollout."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from qarl.config import Config


class SamplingConfig(Config):
    """How training completions are drawn. There is no top-p, top-k or min-p: the learner would need the kept set."""

    temperature: float = Field(
        1.0,
        ge=0.01,
        le=100.0,
        description="Divides the logits. 0 (greedy), or nearly so, is not a policy to train: every choice is certain.",
    )
    max_new_tokens: int = Field(256, ge=1, description="Longest completion, in tokens, its stop token included.")
    max_rounds: int = Field(
        1,
        ge=1,
        le=100,
        description="Dynamic sampling: a step asks other prompts, up to this many times, until `prompts_per_step` "
        "groups have unequal rewards; where they stay too few, others fill the batch. Prompts of rounds that were not "
        "needed are not asked in that epoch. 1: none.",
    )


class NativeEngineConfig(Config):
    """Our own engine: continuous batching, same operations as the learner."""

    type: Literal["native"] = "native"
    kv_cache: Literal["fp32", "int8"] = Field(
        "fp32", description="Number format of cached keys and values; the learner rounds its own in the same way."
    )
    kv_bytes: int = Field(1 << 30, ge=1 << 16, description="Most bytes the key/value cache may take.")
    max_concurrency: int = Field(64, ge=1, description="Most completions decoded at a time.")
    prefill_tokens: int = Field(
        512, ge=1, description="Most tokens of prompts and resumed completions computed in one forward pass."
    )


EngineConfig = NativeEngineConfig
