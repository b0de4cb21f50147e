"""Which matrix gets which scheme: the run's scheme for the decoder's projections, and the recipe's exceptions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import Field, field_validator

from qarl.config import Config
from qarl.errors import ConfigurationError
from qarl.patterns import deciding, family
from qarl.quant.formats import INT8
from qarl.quant.scales import PerRow
from qarl.quant.scheme import Quantizer, Scheme, scheme_named

Shape = tuple[int, int]

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")

HEAD, HEAD_SCHEME = "lm_head", "w12a12-int12"
"""The output head of integer schemes: a fifth of a small model's work, several times faster than in fp32, and far
below the noise of the scheme itself (docs/alignment.md)."""

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Projections of one input, which engines fuse into one matrix; it can have one scheme only."""


class QuantConfig(Config):
    """Exceptions to the run's scheme, and what is done to the weights before the first step."""

    rules: dict[str, str] = Field(
        default_factory=dict,
        description=(
            "Module name patterns (as in a shell: * ? [abc]) and the scheme of the modules they match, e.g. "
            '"*.down_proj" = "none"; where several match a module, the last one counts.'
        ),
    )
    update_aware: float = Field(
        default=1.0,
        ge=1.0,
        description=(
            "Before the first step, quantized matrices that read a norm are divided by this and the norm's gain is "
            "multiplied by it: the same function, of which an update moves this many times more codes (QuRL's UAQ, "
            "which takes 1.5); 1: off."
        ),
    )

    @field_validator("rules")
    @classmethod
    def _schemes_exist(cls, rules: dict[str, str]) -> dict[str, str]:
        for scheme in rules.values():
            scheme_named(scheme)
        return rules


@dataclass(frozen=True, slots=True)
class Choice:
    """One matrix [N, K], its scheme, and why it has that one."""

    shape: Shape
    scheme: Scheme
    reason: str


@dataclass(frozen=True, slots=True)
class SchemePlan:
    """Every linear module of a model, in the model's order, with its scheme."""

    choices: Mapping[str, Choice]

    @property
    def quantized(self) -> dict[str, Scheme]:
        """The modules that are quantized."""
        return {module: choice.scheme for module, choice in self.choices.items() if choice.scheme.quantized}

    def with_scales_in(self, dtype: torch.dtype) -> SchemePlan:
        """The same plan with `Scheme.with_scales_in`; modules that share a scheme go on sharing it."""
        schemes = {choice.scheme: choice.scheme.with_scales_in(dtype) for choice in self.choices.values()}
        choices = {module: replace(choice, scheme=schemes[choice.scheme]) for module, choice in self.choices.items()}
        return SchemePlan(choices)

    def describe(self) -> str:
        """An account for people: totals, then one line for each family of modules (layer numbers as `*`)."""
        quantized = [choice for choice in self.choices.values() if choice.scheme.quantized]
        before = sum(4 * _elements(choice.shape) for choice in self.choices.values())
        after = sum(choice.scheme.stored_bytes(choice.shape) for choice in self.choices.values())
        total = (
            f"quantized {len(quantized)} of {len(self.choices)} matrices, "
            f"{sum(_elements(choice.shape) for choice in quantized) / 1e6:.1f} of "
            f"{before / 4e6:.1f} M parameters; {before / 1e6:.1f} MB as fp32, {after / 1e6:.1f} MB as planned"
        )
        families: dict[tuple[str, Choice], int] = defaultdict(int)
        for module, choice in self.choices.items():
            families[family(module), choice] += 1
        lines = [
            f"  {choice.scheme.name:<12} {count:>4} x {name} {list(choice.shape)}: {choice.reason}"
            for (name, choice), count in families.items()
        ]
        return "\n".join([total, *lines])


def plan_schemes(modules: Sequence[tuple[str, Shape]], scheme: Scheme, config: QuantConfig) -> SchemePlan:
    """Give every linear module [N, K] its scheme.

    ConfigurationError if a rule decides nothing, if fused siblings would differ, or if a matrix does not fill
    whole groups of its scheme.
    """
    deciding_rules = deciding([module for module, _ in modules], config.rules, "[quant.rules]", "linear module")
    choices: dict[str, Choice] = {}
    for module, shape in modules:
        choices[module] = _choose(module, shape, scheme, deciding_rules[module], config.rules)
        choices[module].scheme.check_shape(module, shape)
    _check_siblings_agree(choices)
    return SchemePlan(choices)


def _choose(module: str, shape: Shape, scheme: Scheme, pattern: str | None, rules: Mapping[str, str]) -> Choice:
    if pattern is not None:
        wanted, reason = scheme_named(rules[pattern]), f'rule "{pattern}"'
    elif module.rpartition(".")[2] in PROJECTIONS:
        wanted, reason = scheme, "the run's scheme"
    elif module == HEAD and scheme.activation == Quantizer(INT8, PerRow()):
        wanted, reason = scheme_named(HEAD_SCHEME), "the output head, near full precision by exact integers"
    else:
        wanted, reason = scheme_named("none"), "not a decoder projection"
    fitted = wanted.fitted(shape)
    if fitted is not wanted:
        reason += f"; {shape[1]} inputs are no multiple of {wanted.multiple_of()}, so in smaller groups"
    return Choice(shape, fitted, reason)


def _check_siblings_agree(choices: Mapping[str, Choice]) -> None:
    families: dict[tuple[str, tuple[str, ...]], list[str]] = defaultdict(list)
    for module in choices:
        parent, _, leaf = module.rpartition(".")
        for siblings in SIBLINGS:
            if leaf in siblings:
                # Engines also stack all experts of a layer into one tensor.
                families[re.sub(r"\bexperts\.\d+", "experts.*", parent), siblings].append(module)
    for members in families.values():
        first = members[0]
        for other in members[1:]:
            if choices[other].scheme != choices[first].scheme:
                raise ConfigurationError(
                    f"{first} has scheme '{choices[first].scheme.name}' ({choices[first].reason}) but {other} has "
                    f"'{choices[other].scheme.name}' ({choices[other].reason}); engines fuse them into one matrix: "
                    "give both the same scheme in [quant.rules]"
                )


def _elements(shape: Shape) -> int:
    return shape[0] * shape[1]
