"""What a user chooses about the rollout."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from qarl.config import Config
from qarl.sync.transport import Way

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM keeps places for; adapters of others take the next larger one."""


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


class VllmEngineConfig(Config):
    """vLLM: in a process that qarl starts, or a server that is already there (`urls`)."""

    type: Literal["vllm"] = "vllm"
    urls: tuple[str, ...] = Field(
        (),
        strict=False,
        description="vLLM servers that `qarl serve` started with this recipe, such as 'http://node1:8000'; prompts are "
        "divided among them. Without any, vLLM runs on this machine, as a part of the run.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="Type of what is not quantized, and of activations between products."
    )
    head_dtype: Literal["float32", "model"] = Field(
        "float32",
        description="Type of logits; model: that of `dtype`. In bfloat16, large ones are rounded to steps of 0.125.",
    )
    kv_bytes: int = Field(1 << 30, ge=1 << 20, description="Bytes of the key/value cache, on each device.")
    max_concurrency: int = Field(256, ge=1, description="Most completions decoded at a time.")
    tensor_parallel: int = Field(1, ge=1, description="Devices that share one copy of the model.")
    compiled: bool = Field(
        False, description="Let vLLM compile the model and capture graphs: a slow start, and faster steps on a GPU."
    )
    transport: Way = Field(
        "memory",
        description="How codes reach the workers: by shared memory or a folder on a disk (`folder`) where they run on "
        "this host, or broadcast by gloo or NCCL to other hosts.",
    )
    folder: str = Field("", description="Where versions are put for transport = 'disk'; all workers must see it.")
    timeout_s: float = Field(
        300.0, gt=0.0, description="The longest that vLLM may be silent: without a token, or an answer to a call."
    )
    start_timeout_s: float = Field(
        1800.0, gt=0.0, description="The longest that vLLM on this machine may take to start; says nothing with `urls`."
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Further arguments of vLLM's engine by their names there, for experts."
    )

    @field_validator("urls")
    @classmethod
    def _one_spelling(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(url.rstrip("/") for url in urls)

    @model_validator(mode="after")
    def _a_folder_is_for_a_disk(self) -> Self:
        if (self.transport == "disk") != bool(self.folder):
            raise ValueError(
                f"transport = '{self.transport}' with folder = '{self.folder}': set a folder for 'disk', and only then"
            )
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls names a server twice; every server is named once")
        if self.urls and self.start_timeout_s != VllmEngineConfig.model_fields["start_timeout_s"].default:
            raise ValueError(
                f"start_timeout_s = {self.start_timeout_s:g} says nothing with urls, whose servers are not started by "
                "the run; leave one of the two out"
            )
        return self


EngineConfig = Annotated[NativeEngineConfig | VllmEngineConfig, Field(discriminator="type")]
