"""What a user chooses about a run on several processes."""

from __future__ import annotations

from pydantic import Field

from qarl.config import Config


class ClusterConfig(Config):
    """A run on several processes, which `torchrun` starts; without it these keys have nothing to do."""

    timeout_s: float = Field(
        600.0,
        ge=1.0,
        le=86400.0,
        description="Seconds that a process may give no sign of life, or keep others waiting within an update, before "
        "the run ends.",
    )
