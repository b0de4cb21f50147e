"""Learning-rate factors as pure functions of the step.

Steps count from 0. Warm-up rises from 1/warmup_steps at step 0 to 1 at step warmup_steps - 1, so that no step is
spent at rate 0. Decay starts from 1 at step warmup_steps and would reach `final_fraction` at step `total_steps`, one
past the last, so that the last step still learns when `final_fraction` is 0.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from qarl.config import Config
from qarl.errors import ConfigurationError


class Constant(Config):
    """Factor 1 after warm-up."""

    type: Literal["constant"] = "constant"
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the rate rises linearly to its full value")

    def __call__(self, step: int, total_steps: int) -> float:
        """The factor in (0, 1] of a step >= 0; ConfigurationError when warm-up is longer than the run."""
        return _warmup(step, self.warmup_steps, total_steps)


class Linear(Config):
    """Straight decay from 1 to `final_fraction` after warm-up."""

    type: Literal["linear"] = "linear"
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the rate rises linearly to its full value")
    final_fraction: float = Field(
        default=0.0, ge=0.0, le=1.0, description="Share of the full rate that is left at the end of the run"
    )

    def __call__(self, step: int, total_steps: int) -> float:
        """The factor in [final_fraction, 1] after warm-up; ConfigurationError when warm-up is longer than the run."""
        if step < self.warmup_steps:
            return _warmup(step, self.warmup_steps, total_steps)
        progress = _progress(step, self.warmup_steps, total_steps)
        return self.final_fraction + (1.0 - self.final_fraction) * (1.0 - progress)


class Cosine(Config):
    """Half a cosine from 1 to `final_fraction` after warm-up (Loshchilov and Hutter 2017, eq. 5, one period)."""

    type: Literal["cosine"] = "cosine"
    warmup_steps: int = Field(default=0, ge=0, description="Steps over which the rate rises linearly to its full value")
    final_fraction: float = Field(
        default=0.0, ge=0.0, le=1.0, description="Share of the full rate that is left at the end of the run"
    )

    def __call__(self, step: int, total_steps: int) -> float:
        """The factor in [final_fraction, 1] after warm-up; ConfigurationError when warm-up is longer than the run."""
        if step < self.warmup_steps:
            return _warmup(step, self.warmup_steps, total_steps)
        progress = _progress(step, self.warmup_steps, total_steps)
        return self.final_fraction + (1.0 - self.final_fraction) * 0.5 * (1.0 + math.cos(math.pi * progress))


def _warmup(step: int, warmup_steps: int, total_steps: int) -> float:
    _check_fits(warmup_steps, total_steps)
    return (step + 1) / warmup_steps if step < warmup_steps else 1.0


def _progress(step: int, warmup_steps: int, total_steps: int) -> float:
    """How much of the decay lies behind, in [0, 1]; stays 1 past the end."""
    _check_fits(warmup_steps, total_steps)
    return (step - warmup_steps) / (total_steps - warmup_steps) if step < total_steps else 1.0


def _check_fits(warmup_steps: int, total_steps: int) -> None:
    if warmup_steps > total_steps:
        raise ConfigurationError(
            f"learner.schedule.warmup_steps = {warmup_steps} is more than the {total_steps} steps of the run; "
            "lower it or train longer"
        )
