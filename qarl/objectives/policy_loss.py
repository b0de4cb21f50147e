"""The frame every objective shares: its surrogate, corrected, plus KL and entropy terms, aggregated and reported.

Loss = aggregate(-J * w + kl.coef * KL - entropy_coef * H), where J is the objective's surrogate, w the weights of
its correction and H the entropy. Correction weights touch the surrogate only, as in verl.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from pydantic import Field
from torch import Tensor

from qarl.config import Config
from qarl.metrics import Metrics, Sum
from qarl.objectives.corrections import CorrectionConfig, NoCorrection
from qarl.objectives.terms import Aggregation, KlEstimator, aggregate, kl_to_reference, mean_over
from qarl.records import LossInputs
from qarl.roles import LossReport

AGGREGATION_HELP = (
    "token_mean: over all tokens of the batch; sequence_mean: over each sequence's tokens, then over sequences; "
    "constant: sum over tokens, divided by max_new_tokens and the number of sequences."
)


@dataclass(frozen=True, slots=True, eq=False)
class Surrogate:
    """`objective_BT` is what is to be maximised at each token, with gradient; finite, also where masked."""

    objective_BT: Tensor
    metrics: Metrics


class KlPenalty(Config):
    """A penalty on KL(policy || frozen reference policy), estimated at the sampled tokens."""

    type: KlEstimator = Field("k3", description="Estimator; as a loss k1 has no useful gradient, k2 and k3 have.")
    coef: float = Field(ge=0.0, description="Weight of the penalty in the loss; 0 measures it only.")


class PolicyObjective(Config, ABC):
    """An objective: a surrogate and the terms that go with any surrogate."""

    aggregation: Aggregation = Field("sequence_mean", description=AGGREGATION_HELP)
    kl: KlPenalty | None = Field(None, description="KL penalty to a frozen reference policy; needs its weights.")
    entropy_coef: float = Field(0.0, ge=0.0, description="Weight of the policy's entropy, added to the objective.")

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss cannot be computed without `LossInputs.entropy_BT`."""
        return self.entropy_coef > 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether the loss cannot be computed without `LossInputs.reference_BT`."""
        return self.kl is not None

    @property
    def allows_several_updates(self) -> bool:
        """Whether a rollout batch may feed several updates: the ratio to `old` follows the policy away from it."""
        return True

    @abstractmethod
    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """What this objective maximises, correction included."""

    def __call__(self, inputs: LossInputs) -> LossReport:
        """This micro-batch's share of the batch's loss, to be minimised, and its metrics (`objective/*`, ...)."""
        surrogate = self.surrogate(inputs)
        loss_BT = -surrogate.objective_BT
        metrics = dict(surrogate.metrics)
        if self.kl is not None:
            kl_BT = kl_to_reference(inputs, self.kl.type)
            loss_BT = loss_BT + self.kl.coef * kl_BT
            metrics["objective/kl"] = mean_over(kl_BT, inputs.mask_BT)
        if self.entropy_coef > 0.0:
            assert inputs.entropy_BT is not None, "an objective with an entropy term needs the entropy"
            loss_BT = loss_BT - self.entropy_coef * inputs.entropy_BT
        if inputs.entropy_BT is not None:
            metrics["objective/entropy"] = mean_over(inputs.entropy_BT, inputs.mask_BT)
        loss = aggregate(loss_BT, inputs, self.aggregation)
        metrics["objective/loss"] = Sum(float(loss.detach()))
        return LossReport(loss, metrics)


class CorrectedObjective(PolicyObjective):
    """An objective that composes with any correction for the engine's mismatch."""

    correction: CorrectionConfig = Field(
        default_factory=NoCorrection, description="Weights for the mismatch of engine and learner."
    )

    @abstractmethod
    def uncorrected(self, inputs: LossInputs) -> Surrogate:
        """What this objective maximises when engine and learner agree."""

    def surrogate(self, inputs: LossInputs) -> Surrogate:
        """The uncorrected surrogate times the correction's weights."""
        plain = self.uncorrected(inputs)
        correction = self.correction(inputs)
        return Surrogate(plain.objective_BT * correction.weights, plain.metrics | correction.metrics)
