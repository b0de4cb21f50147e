"""The base of every configuration class. Loading recipes and their overrides lives in `recipe.py`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Config(BaseModel):
    """Frozen and strict: an unknown key, a wrong type or an out-of-range value is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False)
