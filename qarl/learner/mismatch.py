"""How far learner and engine disagree on the same tokens: the project's first health sign.

`d = learner - engine`, in log-probability, token by token, over tokens that the engine sampled.
"""

from __future__ import annotations

from torch import Tensor

from qarl.metrics import Ess, Max, Mean, Metrics


def mismatch_metrics(learner: Tensor, engine: Tensor) -> Metrics:
    """`mismatch/*` of paired log-probabilities [S] of sampled tokens.

    `k3` estimates KL(engine || learner) per token as exp(d) - d - 1 (Schulman 2020); `mult_prob_error` is
    NeMo-RL's mean of exp(|d|); `ess` is the effective sample size of the weights exp(d) as a share of the tokens.
    """
    d = (learner - engine).double()
    count = float(d.numel())
    weights = d.clamp(-20, 20).exp()
    return {
        "mismatch/max_abs": Max(float(d.abs().max())),
        "mismatch/mean_abs": Mean(float(d.abs().sum()), count),
        "mismatch/k3": Mean(float((weights - d.clamp(-20, 20) - 1).sum()), count),
        "mismatch/mult_prob_error": Mean(float(d.abs().clamp(max=20).exp().sum()), count),
        "mismatch/bit_equal": Mean(float((learner == engine).sum()), count),
        "mismatch/ess": Ess(float(weights.sum()), float(weights.square().sum()), count),
    }
