"""What a user chooses about learning. Optimizers and schedules bring their own classes (`optim/`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qarl.config import Config
from qarl.models.lora import LoraConfig
from qarl.optim import AdamW, Constant, OptimizerConfig, ScheduleConfig


class LearnerConfig(Config):
    """How a rollout batch becomes optimizer steps."""

    lr: float = Field(1e-6, gt=0.0, description="Peak learning rate.")
    lr_scales: dict[str, Annotated[float, Field(gt=0.0)]] = Field(
        default_factory=dict,
        description="Patterns (as in a shell: * ? [abc]) of trained parameters' names and what their learning rate is "
        'multiplied by, e.g. "*_proj.weight" = 0.5; where several match a parameter, the last one counts.',
    )
    updates_per_batch: int = Field(
        1, ge=1, description="Optimizer steps per rollout batch; the batch's prompts are split evenly among them."
    )
    micro_batch_tokens: int = Field(
        1024, ge=1, le=65536, description="Most tokens (prompt and completion) in one forward and backward pass."
    )
    head_chunk_tokens: int = Field(
        256,
        ge=1,
        description="Bounds the logits that exist at a time: as many numbers as those of this many positions.",
    )
    skip_equal_groups: Literal["auto"] | bool = Field(
        "auto",
        description="Compute nothing for groups whose advantages are all 0: their gradient is 0, unless the loss has a "
        "KL or entropy term (auto: then computed; true: refused). `mismatch/*` and `objective/*` cover what is "
        "computed.",
    )
    activation_checkpointing: bool = Field(
        True, description="Keep one activation per layer and recompute the rest in the backward pass."
    )
    gradients: Literal["auto", "int8", "fp32"] = Field(
        "auto",
        description="GEMMs of the backward pass. auto: integer schemes multiply their codes by the output's gradient "
        "rounded to 16 bits (relative error about 1e-4); int8: rounded to 8 bits, up or down at random so that the "
        "mean is right; fp32: always in full precision.",
    )
    max_grad_norm: float = Field(1.0, gt=0.0, description="Global gradient norm is clipped to this.")
    max_skipped_updates: int = Field(
        3, ge=0, description="Consecutive updates with a non-finite loss or gradient before the run stops."
    )
    lora: LoraConfig | None = Field(
        None, description="Adapters are trained and everything else is frozen; without this table, everything is."
    )
    optimizer: OptimizerConfig = Field(default_factory=AdamW, description="The update rule.")
    schedule: ScheduleConfig = Field(
        default_factory=Constant, description="Learning-rate factor as a function of the step."
    )
