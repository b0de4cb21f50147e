"""The optimizers a run can choose, and the one object a learner holds: steps, learning rate, state by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, JsonValue, ValidationError
from torch import Tensor

from qarl.config import Config
from qarl.errors import RunError
from qarl.optim.groups import NO_SCALES, Method, ParameterGroup, Treatment, describe, group_parameters

COUNT = "step"
"""The one quantity of an optimizer's state that is not shaped like its parameter: how many steps were made."""

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class AdamW(Config):
    """AdamW (Loshchilov and Hutter 2019) for every parameter.

    beta2 is 0.95 rather than 0.999: after a calm stretch one huge gradient moves a weight by at most
    (1 - beta1) / sqrt(1 - beta2) = 0.45 lr, instead of 3.2 lr, and the estimate forgets it after 20 steps, not 1000.
    """

    type: Literal["adamw"] = "adamw"
    betas: tuple[Beta, Beta] = Field(
        default=(0.9, 0.95), strict=False, description="Decay of the running means of gradient and squared gradient"
    )
    eps: float = Field(default=1e-8, gt=0.0, description="Added to the root of the squared-gradient mean")
    weight_decay: float = Field(
        default=0.0, ge=0.0, description="Decoupled weight decay; never applied to norms, biases and embeddings"
    )

    def build(
        self, named_parameters: Iterable[tuple[str, Tensor]], lr: float, lr_scales: Mapping[str, float] = NO_SCALES
    ) -> NamedOptimizer:
        """An optimizer over the trainable parameters, all at rate `lr` (> 0) but for those that `lr_scales` name.

        Raises ConfigurationError for a pattern of `lr_scales` that decides nothing.
        """
        treatment = Treatment("adamw", lr, self.weight_decay)
        groups = group_parameters(named_parameters, treatment, treatment, lr_scales)
        return NamedOptimizer(self.type, lr, groups, [self.over(groups)])

    def over(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        """The torch optimizer of those groups whose method is "adamw"."""
        return torch.optim.AdamW(_torch_groups(groups, "adamw"), betas=self.betas, eps=self.eps, fused=True)


class Muon(Config):
    """Muon (Jordan et al. 2024) for the decoder's projections, AdamW for embeddings, head, router, norms and biases.

    The step of every matrix is scaled by 0.2 sqrt(max(rows, columns)), so that its size is that of an AdamW step
    (Liu et al. 2025, arXiv 2502.16982, eq. 4) and one learning rate serves both parts.
    """

    type: Literal["muon"] = "muon"
    momentum: float = Field(default=0.95, ge=0.0, lt=1.0, description="Decay of the running mean of the gradient")
    newton_schulz_steps: int = Field(
        default=5, ge=1, le=20, description="Iterations that bring a step's singular values near 1"
    )
    weight_decay: float = Field(default=0.0, ge=0.0, description="Decoupled weight decay of the projections")
    adamw_lr_ratio: float = Field(
        default=1.0, gt=0.0, description="Learning rate of the AdamW part, as a multiple of learner.lr"
    )
    adamw: AdamW = Field(default=AdamW(), description="Settings of the AdamW part")

    def build(
        self, named_parameters: Iterable[tuple[str, Tensor]], lr: float, lr_scales: Mapping[str, float] = NO_SCALES
    ) -> NamedOptimizer:
        """An optimizer over the trainable parameters: projections at `lr` (> 0), the rest at `lr * adamw_lr_ratio`.

        `lr_scales` multiply both. Raises ConfigurationError when a projection is not a matrix (experts stored as one
        3-D tensor), or a pattern of `lr_scales` decides nothing.
        """
        groups = group_parameters(
            named_parameters,
            projections=Treatment("muon", lr, self.weight_decay),
            rest=Treatment("adamw", lr * self.adamw_lr_ratio, self.adamw.weight_decay),
            lr_scales=lr_scales,
        )
        methods = {group.treatment.method for group in groups}
        optimizers: list[torch.optim.Optimizer] = []
        if "muon" in methods:
            optimizers.append(self._over_projections(groups))
        if "adamw" in methods:
            optimizers.append(self.adamw.over(groups))
        return NamedOptimizer(self.type, lr, groups, optimizers)

    def _over_projections(self, groups: Sequence[ParameterGroup]) -> torch.optim.Optimizer:
        return torch.optim.Muon(
            _torch_groups(groups, "muon"),
            momentum=self.momentum,
            ns_steps=self.newton_schulz_steps,
            adjust_lr_fn="match_rms_adamw",
        )


class NamedOptimizer:
    """One or two torch optimizers behind one face, whose state is kept by parameter name."""

    def __init__(
        self,
        kind: str,
        lr: float,
        groups: Sequence[ParameterGroup],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        self.kind = kind
        self.groups = tuple(groups)
        self._lr = lr
        self._factor = 1.0
        self._optimizers = tuple(optimizers)
        self._full_rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]

    @property
    def lr(self) -> float:
        """The rate of the next step, for `optim/lr`: the configured one times the schedule's factor."""
        return self._lr * self._factor

    def describe(self) -> str:
        """Which parameters are treated how; one line a role."""
        return describe(self.groups)

    def set_lr(self, factor: float) -> None:
        """Run from now on at `factor` (>= 0) times each group's configured rate."""
        self._factor = factor
        for optimizer, rates in zip(self._optimizers, self._full_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def step(self) -> None:
        """Apply the gradients; parameters without one are left alone."""
        for optimizer in self._optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    def export_state(self) -> tuple[dict[str, Tensor], dict[str, JsonValue]]:
        """Everything `import_state` needs to go on bit for bit, as `<parameter>.<quantity>` tensors and JSON values.

        The tensors are the live ones, not copies: write them before the next step. Hyperparameters are not included;
        they come from the recipe.
        """
        tensors: dict[str, Tensor] = {}
        layout: dict[str, SavedParameter] = {}
        for optimizer, name, parameter in self._slots():
            quantities: dict[str, Tensor] = optimizer.state.get(parameter, {})
            tensors |= {f"{name}.{quantity}": tensor for quantity, tensor in quantities.items()}
            layout[name] = SavedParameter(
                shape=list(parameter.shape), dtype=str(parameter.dtype), quantities=sorted(quantities)
            )
        saved = SavedState(optimizer=self.kind, lr_factor=self._factor, parameters=layout)
        return tensors, saved.model_dump(mode="json")

    def check_state(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, JsonValue]) -> None:
        """RunError when this is not what `export_state` of the same optimizer over the same parameters returned: when
        the optimizer's type, a name, a shape or a dtype differs.
        """
        self._check_same(_saved(scalars), tensors)

    def allocate_state(self, scalars: Mapping[str, JsonValue]) -> None:
        """Have every quantity that was saved, as zeros; what `export_state` returns then is to be filled."""
        saved = _saved(scalars)
        for optimizer, name, parameter in self._slots():
            quantities = saved.parameters[name].quantities
            optimizer.state[parameter] = {
                quantity: torch.zeros((), device=parameter.device)
                if quantity == COUNT
                else torch.zeros_like(parameter.detach())
                for quantity in quantities
            }
        self.set_lr(saved.lr_factor)

    def import_state(self, tensors: Mapping[str, Tensor], scalars: Mapping[str, JsonValue]) -> None:
        """Take over what `export_state` returned; tensors are copied.

        Raises RunError as `check_state` does, before anything is changed.
        """
        self.check_state(tensors, scalars)
        self.allocate_state(scalars)
        for key, tensor in self.export_state()[0].items():
            tensor.copy_(tensors[key])

    def _slots(self) -> Iterable[tuple[torch.optim.Optimizer, str, Tensor]]:
        names = {parameter: name for group in self.groups for name, parameter in group.parameters.items()}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield optimizer, names[parameter], parameter

    def _check_same(self, saved: SavedState, tensors: Mapping[str, Tensor]) -> None:
        if saved.optimizer != self.kind:
            raise RunError(f"optimizer state was written by {saved.optimizer!r}, but this run uses {self.kind!r}")
        ours = {name: parameter for _, name, parameter in self._slots()}
        _refuse(ours.keys() - saved.parameters.keys(), "has nothing for")
        _refuse(saved.parameters.keys() - ours.keys(), "has parameters that the model lacks:")
        _refuse((_difference(name, ours[name], saved.parameters[name]) for name in ours), "does not fit:")
        expected = {f"{name}.{quantity}": name for name in ours for quantity in saved.parameters[name].quantities}
        _refuse(expected.keys() - tensors.keys(), "lacks tensors:")
        shaped = [(key, ours[name]) for key, name in expected.items() if not key.endswith(f".{COUNT}")]
        _refuse((key for key, parameter in shaped if tensors[key].shape != parameter.shape), "has misshapen tensors:")


class SavedParameter(Config):
    """What was saved of one parameter: its own shape and dtype, and which of its quantities exist."""

    shape: list[int]
    dtype: str
    quantities: list[str]


class SavedState(Config):
    """The JSON half of an optimizer's state."""

    optimizer: str
    lr_factor: float
    parameters: dict[str, SavedParameter]


def _saved(scalars: Mapping[str, JsonValue]) -> SavedState:
    try:
        return SavedState.model_validate(dict(scalars))
    except ValidationError as error:
        raise RunError(f"optimizer state cannot be read: {error.errors()[0]['msg']}") from error


def _torch_groups(groups: Sequence[ParameterGroup], method: Method) -> list[dict[str, Any]]:
    return [
        {
            "params": list(group.parameters.values()),
            "lr": group.treatment.lr,
            "weight_decay": group.treatment.weight_decay,
        }
        for group in groups
        if group.treatment.method == method
    ]


def _difference(name: str, parameter: Tensor, saved: SavedParameter) -> str | None:
    here, there = (list(parameter.shape), str(parameter.dtype)), (saved.shape, saved.dtype)
    return None if here == there else f"{name} is {here[1]} {here[0]}, saved as {there[1]} {there[0]}"


def _refuse(faults: Iterable[str | None], what: str) -> None:
    named = sorted(fault for fault in faults if fault is not None)
    if named:
        more = f" and {len(named) - 5} more" if len(named) > 5 else ""
        raise RunError(f"optimizer state {what} {', '.join(named[:5])}{more}")
