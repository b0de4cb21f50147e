"""Which parameter gets which treatment, decided by its Hugging Face name and shape, and a printed account of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from qarl.errors import ConfigurationError
from qarl.patterns import deciding, family

Role = Literal["projection", "head", "router", "embedding", "norm", "bias", "other", "frozen"]
Method = Literal["muon", "adamw", "none"]

DECAYED: frozenset[Role] = frozenset({"projection", "head", "router"})
"""Roles that weight decay applies to. Norms, biases and embeddings (so a tied head too) are left out: their size
carries meaning of its own, and a row of an unused token would shrink without ever getting a gradient. What we do
not recognize is not decayed either."""

NO_SCALES: Mapping[str, float] = MappingProxyType({})
"""Every parameter has the rate of its part."""


@dataclass(frozen=True, slots=True, eq=False)
class Treatment:
    """How an optimizer treats parameters: `lr` at schedule factor 1, `weight_decay` decoupled, per unit of lr."""

    method: Method
    lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True, eq=False)
class ParameterGroup:
    """All parameters of one role and learning rate, by name, with their one treatment."""

    role: Role
    treatment: Treatment
    parameters: Mapping[str, Tensor]


def role_of(name: str, num_dims: int) -> Role:
    """The role of a parameter of a decoder, by its Hugging Face name.

    Example: `model.layers.0.self_attn.q_proj.weight` with 2 dimensions is a "projection", and
    `model.layers.0.mlp.gate.weight` the "router" of a mixture of experts. A name that fits nothing is "other".
    """
    *modules, leaf = name.split(".")
    module = modules[-1] if modules else ""
    if leaf == "bias":
        return "bias"
    if module.endswith("norm"):
        return "norm"
    if module.startswith("embed"):
        return "embedding"
    if module == "lm_head":
        return "head"
    if module == "gate":
        return "router"
    if "layers" in modules and num_dims >= 2:
        return "projection"
    return "other"


def group_parameters(
    named_parameters: Iterable[tuple[str, Tensor]],
    projections: Treatment,
    rest: Treatment,
    lr_scales: Mapping[str, float] = NO_SCALES,
) -> tuple[ParameterGroup, ...]:
    """Sort parameters by role: decoder projections get one treatment, everything else the other.

    Weight decay is set to 0 for roles outside `DECAYED`; parameters without `requires_grad` become the group "frozen",
    which no optimizer sees. `lr_scales` multiply the rate of the parameters that their patterns decide. Raises
    ConfigurationError when nothing is trainable, when a pattern decides nothing, or when Muon is asked to treat a
    projection that is not a matrix.
    """
    named: dict[str, Tensor] = {}
    seen: set[Tensor] = set()
    for name, parameter in named_parameters:
        assert name not in named and parameter not in seen, f"parameter {name} was handed over twice"
        named[name] = parameter
        seen.add(parameter)
    trained = [name for name, parameter in named.items() if parameter.requires_grad]
    if not trained:
        raise ConfigurationError("optimizer: there is no trainable parameter; unfreeze some of the model")
    scaled_by = deciding(trained, lr_scales, "[learner.lr_scales]", "trained parameter")
    members: dict[tuple[Role, float], dict[str, Tensor]] = {}
    for name, parameter in named.items():
        role: Role = role_of(name, parameter.ndim) if parameter.requires_grad else "frozen"
        pattern = scaled_by.get(name)
        members.setdefault((role, 1.0 if pattern is None else lr_scales[pattern]), {})[name] = parameter
        if role == "projection" and projections.method == "muon":
            _refuse_non_matrix(name, parameter)
    return tuple(
        ParameterGroup(role, _treatment_of(role, projections, rest, scale), members[role, scale])
        for role, scale in sorted(members)
    )


def describe(groups: Iterable[ParameterGroup]) -> str:
    """One line a group: method, learning rate, decay, how many tensors and numbers, and their names.

    Layer and expert indices in names are written `*`, with the number of tensors that the pattern stands for.
    """
    lines = []
    for group in groups:
        treatment = group.treatment
        numbers = sum(parameter.numel() for parameter in group.parameters.values())
        patterns = Counter(map(family, group.parameters))
        names = ", ".join(f"{pattern} ({count})" if count > 1 else pattern for pattern, count in patterns.items())
        settings = "" if group.role == "frozen" else f" lr {treatment.lr:g} decay {treatment.weight_decay:g}"
        lines.append(
            f"{group.role:<10} {treatment.method:<5}{settings}: "
            f"{len(group.parameters)} tensors, {numbers:,} numbers: {names}"
        )
    return "\n".join(lines)


def _treatment_of(role: Role, projections: Treatment, rest: Treatment, lr_scale: float) -> Treatment:
    if role == "frozen":
        return Treatment("none", lr=0.0, weight_decay=0.0)
    treatment = projections if role == "projection" else rest
    decay = treatment.weight_decay if role in DECAYED else 0.0
    return Treatment(treatment.method, treatment.lr * lr_scale, decay)


def _refuse_non_matrix(name: str, parameter: Tensor) -> None:
    if parameter.ndim != 2:
        raise ConfigurationError(
            f"optimizer: {name} has shape {list(parameter.shape)}, and Muon treats matrices only; "
            'store experts one matrix each, or set optimizer type "adamw"'
        )
