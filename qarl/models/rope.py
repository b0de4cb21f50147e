"""Rotary position embedding: its frequencies, and the published ways of stretching them to longer contexts.

Formulas: RoPE (Su et al. 2021, arXiv 2104.09864, section 3.2); linear interpolation (Chen et al. 2023, arXiv
2306.15595, section 2.3); YaRN (Peng et al. 2023, arXiv 2309.00071, sections 3.2 and 3.4); `llama3` as released with
Llama 3.1. The order of the fp32 operations is that of `transformers`, so that both compute the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from qarl.errors import ConfigurationError

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary embedding; fields that its `type` does not use stay at their defaults.

    `original_max_position` is the context length, in tokens, that the model was trained with before it was stretched.
    """

    type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str) -> RopeConfig:
        """Read `rope_theta` with `rope_scaling` (transformers 4) or `rope_parameters` (5) of a config.json.

        `where` names the file in errors. Raises ConfigurationError for a type or key that is not supported.
        """
        rope: Mapping[str, Any] = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
        type_ = rope.get("rope_type", rope.get("type", "default"))
        _refuse_unsupported(hf, rope, type_, where)
        context = _trained_context(hf, rope, where)
        if type_ == "yarn" and rope.get("factor") is None:
            rope = {**rope, "factor": hf["max_position_embeddings"] / context}
        theta = _number(rope, "rope_theta", where, hf.get("rope_theta") or 10_000.0)
        if type_ == "default":
            return cls(theta=theta)
        factor = _number(rope, "factor", where)
        if type_ == "linear":
            return cls("linear", theta, factor)
        if type_ == "llama3":
            low, high = _number(rope, "low_freq_factor", where), _number(rope, "high_freq_factor", where)
            if low >= high:
                raise ConfigurationError(f"{where}: rope low_freq_factor {low} must be below high_freq_factor {high}")
            return cls("llama3", theta, factor, context, low, high)
        return cls(
            "yarn",
            theta,
            factor,
            context,
            attention_factor=_optional_number(rope, "attention_factor", where),
            beta_fast=_number(rope, "beta_fast", where, 32.0),
            beta_slow=_number(rope, "beta_slow", where, 1.0),
            mscale=_optional_number(rope, "mscale", where),
            mscale_all_dim=_optional_number(rope, "mscale_all_dim", where),
            truncate=bool(rope.get("truncate", True)),
        )

    def to_hf(self) -> dict[str, Any]:
        """The `rope_parameters` of a config.json; only the keys that the type uses."""
        rope: dict[str, Any] = {"rope_type": self.type, "rope_theta": self.theta}
        if self.type == "default":
            return rope
        rope["factor"] = self.factor
        if self.type == "linear":
            return rope
        rope["original_max_position_embeddings"] = self.original_max_position
        if self.type == "llama3":
            return {**rope, "low_freq_factor": self.low_freq_factor, "high_freq_factor": self.high_freq_factor}
        rope |= {"beta_fast": self.beta_fast, "beta_slow": self.beta_slow, "truncate": self.truncate}
        optional = {
            "attention_factor": self.attention_factor,
            "mscale": self.mscale,
            "mscale_all_dim": self.mscale_all_dim,
        }
        return rope | {key: value for key, value in optional.items() if value is not None}

    def inverse_frequencies(self, head_dim: int) -> Tensor:
        """Radians a token for each pair of a head's dimensions: [head_dim / 2] float32."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        frequencies = 1.0 / (self.theta**exponents)
        if self.type == "linear":
            return frequencies / self.factor
        if self.type == "llama3":
            return self._llama3(frequencies)
        if self.type == "yarn":
            return self._yarn(self.theta**exponents, head_dim)
        return frequencies

    def table_scale(self) -> float:
        """What cosines and sines are multiplied with: YaRN's attention factor (its section 3.4), else 1."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_scale(self.factor, self.mscale) / _yarn_scale(self.factor, self.mscale_all_dim)
        return _yarn_scale(self.factor, 1.0)

    def _llama3(self, frequencies: Tensor) -> Tensor:
        assert self.original_max_position is not None
        assert self.low_freq_factor is not None
        assert self.high_freq_factor is not None
        context, low, high = self.original_max_position, self.low_freq_factor, self.high_freq_factor
        wavelengths = 2 * math.pi / frequencies
        stretched = torch.where(wavelengths > context / low, frequencies / self.factor, frequencies)
        blend = (context / wavelengths - low) / (high - low)
        blended = (1 - blend) * stretched / self.factor + blend * stretched
        in_between = (wavelengths >= context / high) & (wavelengths <= context / low)
        return torch.where(in_between, blended, stretched)

    def _yarn(self, periods: Tensor, head_dim: int) -> Tensor:
        low, high = self._yarn_range(head_dim)
        ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        keep = 1 - ramp
        return 1.0 / (self.factor * periods) * (1 - keep) + 1.0 / periods * keep

    def _yarn_range(self, head_dim: int) -> tuple[float, float]:
        """Between which pairs the frequencies go over from kept to interpolated."""
        assert self.original_max_position is not None
        context = self.original_max_position

        def pair_that_turns(rotations: float) -> float:
            return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_that_turns(self.beta_fast), pair_that_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        return low, high + 0.001 if low == high else high


_KNOWN_KEYS = {
    "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
    "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "partial_rotary_factor",
}  # fmt: skip


def _refuse_unsupported(hf: Mapping[str, Any], rope: Mapping[str, Any], type_: object, where: str) -> None:
    if type_ not in get_args(RopeType):
        supported = ", ".join(get_args(RopeType))
        raise ConfigurationError(f"{where}: rope type {type_!r} is not supported (supported: {supported})")
    if unknown := sorted(set(rope) - _KNOWN_KEYS):
        raise ConfigurationError(f"{where}: rope parameter {unknown[0]!r} is not supported")
    for partial in (hf.get("partial_rotary_factor"), rope.get("partial_rotary_factor")):
        if partial not in (None, 1):
            raise ConfigurationError(
                f"{where}: partial_rotary_factor {partial} is not supported; every dimension of a head must rotate"
            )
    if hf.get("rope_interleaved"):
        raise ConfigurationError(f"{where}: rope_interleaved is not supported; only the half-split layout is")


def _trained_context(hf: Mapping[str, Any], rope: Mapping[str, Any], where: str) -> int:
    """As in transformers: a key beside the rope parameters goes before one among them; default is the whole context."""
    key = "original_max_position_embeddings"
    context = hf.get(key) or rope.get(key) or hf["max_position_embeddings"]
    if isinstance(context, bool) or not isinstance(context, int) or context < 1:
        raise ConfigurationError(f"{where}: {key} must be a whole number above 0, not {context!r}")
    return context


def _number(rope: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = rope.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigurationError(f"{where}: rope parameter {key} must be a number above 0, not {value!r}")
    return float(value)


def _optional_number(rope: Mapping[str, Any], key: str, where: str) -> float | None:
    # 0 means "not given" here, as in transformers.
    return _number(rope, key, where) if rope.get(key) else None


def _yarn_scale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
