"""What the rooms hand to each other: the nouns of the system.

Shape letters: P prompts of a step, G completions of a prompt, B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One question, rendered and tokenized once.

    `id` is stable within its source ("arithmetic/17"); `row` holds every column of the source's row, which
    rewards read. Example: Prompt("arithmetic/17", (1, 9690, 198), "<|im_start|>...", {"answer": "7"}).
    """

    id: str
    token_ids: tuple[int, ...]
    text: str
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy, for evaluation only; it is not a policy to train."""

    temperature: float = 1.0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One answer, token by token; the stop token, when there is one, is its last token.

    `token_ids` [T] int64; `engine_logprobs` [T] float32, of the distribution sampled from (after
    temperature); `versions` [T] int64, the weight version that produced each token. `text` is decoded for
    rewards and people, and is never encoded back. One that is "aborted" is not finished, perhaps not begun (T = 0).
    """

    token_ids: Tensor
    engine_logprobs: Tensor
    versions: Tensor
    finish_reason: FinishReason
    text: str

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The completions of one prompt."""

    prompt: Prompt
    completions: tuple[Completion, ...]


ErrorKind = Literal["exception", "timeout", "crash", "invalid"]
"""What keeps a reward term from giving a value: it raised, took too long, ended its process (by a signal, an exit, too
much memory), or returned what is no finite number."""


@dataclass(frozen=True, slots=True)
class RewardError:
    """Why the reward term `term` has no value for completion `completion` (counted from 0) of a prompt; one line."""

    prompt_id: str
    completion: int
    term: str
    kind: ErrorKind
    reason: str

    def __str__(self) -> str:
        return f"prompt {self.prompt_id}, completion {self.completion}, reward {self.term}: {self.reason}"


@dataclass(frozen=True, slots=True, eq=False)
class GroupRewards:
    """Rewards of one group: `total` [G] float32 and each weighted term's raw values [G].

    NaN marks a completion without a reward; it is left out of training and never counts as zero. It is one of
    `num_aborted`, which were not scored, or there are `errors` that say why. In `terms`, NaN also marks a completion
    that a term does not apply to. `is_trained`: the group was chosen for the update.
    """

    total: Tensor
    terms: Mapping[str, Tensor] = field(default_factory=dict)
    errors: tuple[RewardError, ...] = ()
    num_aborted: int = 0
    is_trained: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class LossInputs:
    """What an objective sees of one micro-batch, padded to [B, T]; `mask_BT` is True on trained tokens.

    Values under a False mask are finite but meaningless. `new` carries the gradient, `old` is the learner
    before the first update on this batch, `engine` what the sampler reported. `num_sequences` and
    `num_tokens` count the whole optimizer batch, so that splitting it cannot change the gradient;
    `max_new_tokens` is the sampling limit (for constant normalization). `entropy_BT` carries a
    gradient, and `reference_BT` (log-probabilities of a frozen reference policy) is present, only when the
    objective asks for them.
    `tokens_BT` int64 are the sampled tokens themselves.
    """

    new_BT: Tensor
    old_BT: Tensor
    engine_BT: Tensor
    advantages_B: Tensor
    mask_BT: Tensor
    num_sequences: int
    num_tokens: int
    max_new_tokens: int
    entropy_BT: Tensor | None = None
    reference_BT: Tensor | None = None
    tokens_BT: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The weights of one version, quantized once: what the engine serves and the learner multiplies with.

    `tensors` has Hugging Face names; a quantized matrix appears as `<module>.weight` (codes) and
    `<module>.weight_scale`. `schemes` maps each quantized module to its scheme's name. `operands` is the
    in-process shortcut: kernel-ready forms of these same tensors, by module name, which a receiver in the
    same process may use instead of building its own.

    With `lora`, the tensors are adapters alone, with PEFT's names, and the checksum covers what `lora` says too.
    """

    version: int
    tensors: Mapping[str, Tensor]
    schemes: Mapping[str, str]
    checksum: str
    operands: Mapping[str, Any] | None = None
    lora: Lora | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Lora:
    """What adapters belong to: (`alpha` / `rank`) B A is added to the weights of `base`.

    A receiver that serves a base with this checksum already need not read it.
    """

    base: Snapshot
    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


Advantages = Sequence[Tensor]
"""One [G] float32 tensor a group; NaN marks a completion that is not to be trained on."""
