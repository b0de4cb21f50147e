"""One completion on its way, and the layout of a forward over many of them. No arithmetic here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from qarl.errors import ConfigurationError
from qarl.ops.device import HOST
from qarl.ops.reference import Spans
from qarl.records import Completion, FinishReason, Group, Prompt, Sampling
from qarl.rollout.cache import Region
from qarl.rollout.seeds import stream_key

Progress = Callable[[int, int], None]
"""Called with (finished, total) completions after every step of a rollout: whoever watches sees that it goes on."""


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A prompt that several requests continue; computed once. `hidden` [D] is its last token's, once prefilled."""

    prompt: Prompt
    waiting: int
    region: Region = field(default_factory=Region)
    hidden: Tensor | None = None

    @property
    def next_position(self) -> int:
        """Position in the whole sequence of the first token whose keys and values are not stored."""
        return self.region.length

    def to_prefill(self) -> Sequence[int]:
        """Tokens to be stored before one can be sampled."""
        return self.prompt.token_ids[self.region.length :]

    def spans(self) -> list[tuple[int, int]]:
        """Where the keys of the sequence lie so far, from position 0 on."""
        return self.region.spans()


@dataclass(slots=True, eq=False)
class Request:
    """One completion: what it continues, where it keeps its keys, what it has so far.

    It may come with tokens, as one that was aborted does; `versions` are those of the tokens it came with. Its newest
    token is never stored: computing it is what predicts the next.
    """

    shared: SharedPrompt
    index: int
    stream: int
    region: Region = field(default_factory=Region)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def next_position(self) -> int:
        """As of a shared prompt."""
        return len(self.shared.prompt.token_ids) + self.region.length

    def to_prefill(self) -> Sequence[int]:
        """As of a shared prompt: nothing, but where it came with tokens."""
        return self.token_ids[self.region.length : -1]

    def spans(self) -> list[tuple[int, int]]:
        """As of a shared prompt; that comes first."""
        return self.shared.spans() + self.region.spans()

    def take(self, token: int, logprob: float, stop_token_ids: Sequence[int], max_new_tokens: int) -> None:
        """Append a sampled token and notice the end."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.token_ids) == max_new_tokens:
            self.finish_reason = "length"


def unstarted(prompts: Sequence[Prompt], group_size: int) -> list[Group]:
    """Groups as `generate` would return them if it were stopped before its first step."""
    nothing = torch.tensor([], dtype=torch.int64, device=HOST)
    completion = Completion(nothing, nothing.float(), nothing, "aborted", "")
    return [Group(prompt, (completion,) * group_size) for prompt in prompts]


def make_requests(prompts: Sequence[Prompt], group_size: int, seed: tuple[int, ...]) -> list[Request]:
    """`group_size` requests for every prompt, in order, sharing the prompt."""
    return requests_of(unstarted(prompts, group_size), seed)


def requests_of(groups: Sequence[Group], seed: tuple[int, ...]) -> list[Request]:
    """A request for every aborted completion, in order; those of a group share the prompt."""
    requests = []
    repeats: Counter[str] = Counter()
    for group in groups:
        prompt = group.prompt
        aborted = [(i, c) for i, c in enumerate(group.completions) if c.finish_reason == "aborted"]
        shared = SharedPrompt(prompt, waiting=len(aborted))
        for index, completion in aborted:
            # How often a prompt came before tells apart two equal ones; its place in the batch must not matter.
            request = Request(shared, index, stream_key((*seed, repeats[prompt.id]), prompt.id, index))
            request.token_ids = completion.token_ids.tolist()
            request.logprobs = completion.engine_logprobs.tolist()
            request.versions = completion.versions.tolist()
            requests.append(request)
        repeats[prompt.id] += 1
    return requests


def check_limit(requests: Sequence[Request], sampling: Sampling) -> None:
    """ConfigurationError for a request that may not have one more token."""
    for request in requests:
        if len(request.token_ids) >= sampling.max_new_tokens:
            raise ConfigurationError(
                f"prompt {request.shared.prompt.id}, completion {request.index}: cannot be resumed, it has "
                f"{len(request.token_ids)} tokens and sampling.max_new_tokens = {sampling.max_new_tokens} counts them; "
                "raise it"
            )


def spans_of(sequences: Sequence[Sequence[tuple[int, int]]], queries: Sequence[Sequence[int]]) -> Spans:
    """Lay out `queries[s]` (how many keys each query of sequence s sees) over the sequences' spans."""
    starts = [start for spans in sequences for start, _ in spans]
    lengths = [length for spans in sequences for _, length in spans]
    pointers = [0]
    for spans in sequences:
        pointers.append(pointers[-1] + len(spans))
    owners = [s for s, visible in enumerate(queries) for _ in visible]
    visible = [count for counts in queries for count in counts]
    return Spans(
        sequences=torch.tensor(owners),
        visible=torch.tensor(visible),
        pointers=torch.tensor(pointers),
        starts=torch.tensor(starts),
        lengths=torch.tensor(lengths),
        families=torch.tensor([0, len(visible)]),
        longest=max(visible),
    )
