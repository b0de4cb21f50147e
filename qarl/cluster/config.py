"""Which parts of a run live in other processes."""

from __future__ import annotations

import re
from typing import Self

from pydantic import Field, field_validator, model_validator

from qarl.config import Config


class ClusterConfig(Config):
    """Engines as Ray actors (`pip install 'qarl-llm[cluster]'`), where no bit of a completion changes; `timeout_s` is
    also that of ranks, which `torchrun` starts.
    """

    engines: int = Field(0, ge=0, description="Engines in processes of their own; 0: one, in the learner's process.")
    ray_address: str = Field(
        "", description="A running Ray cluster (host:port, or `auto`) that this machine is part of; empty: only here."
    )
    engine_cpus: int = Field(1, ge=1, description="Threads of every engine, and CPUs that Ray sets aside for it.")
    engine_gpus: float = Field(0.0, ge=0.0, description="GPUs that Ray sets aside for every engine.")
    restarts: int = Field(
        0, ge=0, description="Dead or hung engines that are replaced in a run; past that many, the run ends."
    )
    timeout_s: float = Field(
        600.0,
        gt=0.0,
        le=86400.0,
        description="Longest that a part of the cluster may give no sign of life, in seconds: while an engine starts "
        "or loads weights until it is done, in a rollout until its next step; a rank always, and within an update it "
        "may keep others waiting no longer.",
    )

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> Self:
        defaults = {"ray_address": "", "engine_cpus": 1, "engine_gpus": 0.0, "restarts": 0}
        set_in_vain = [name for name, default in defaults.items() if getattr(self, name) != default]
        if self.engines == 0 and set_in_vain:
            raise ValueError(f"{set_in_vain[0]} says nothing with engines = 0; set engines, or leave it out")
        return self

    @field_validator("ray_address")
    @classmethod
    def _is_an_address(cls, address: str) -> str:
        if address not in ("", "auto") and re.fullmatch(r"[^/\s]+:\d+", address) is None:
            raise ValueError(
                f"'{address}' is neither host:port nor 'auto'; start the run on a machine of the cluster: a client's "
                "connection (ray://) could not share weights"
            )
        return address
