"""Rollouts to packed micro-batches: no padding in the forward, each prompt computed once for its completions.

A micro-batch is a run of tokens: for every group its prompt, then each completion without its last token, which
predicts nothing. A completion's tokens see the prompt's keys and their own. Shape letters: T packed tokens,
B completions, S scored tokens, L longest completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from math import isnan

import torch
from torch import Tensor

from qarl.errors import RunError
from qarl.ops.device import HOST
from qarl.ops.reference import Spans
from qarl.records import Advantages, Completion, Group, Prompt


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A completion that will be trained on."""

    completion: Completion
    advantage: float


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A prompt with some of its completions: what one micro-batch computes together."""

    prompt: Prompt
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Packed inputs, where to read predictions, and the padded frame [B, L] that objectives see.

    Scored token s is predicted at packed row `scored_rows_S[s]`, is token `targets_S[s]`, and stands at
    (`sequence_S[s]`, `time_S[s]`) of the frame. `longest` exceeds every position. Completion b answers the prompt
    `prompt_ids[b]`.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    spans: Spans
    longest: int
    scored_rows_S: Tensor
    targets_S: Tensor
    sequence_S: Tensor
    time_S: Tensor
    engine_BL: Tensor
    tokens_BL: Tensor
    mask_BL: Tensor
    advantages_B: Tensor
    prompt_ids: tuple[str, ...]

    def frame(self, scored_S: Tensor) -> Tensor:
        """Put one number per scored token into the [B, L] frame; the padding is 0. Differentiable."""
        return scored_S.new_zeros(self.mask_BL.shape).index_put((self.sequence_S, self.time_S), scored_S)


def shares_of(groups: Sequence[Group], advantages: Advantages) -> list[Share]:
    """Groups without completions that are empty or have a NaN advantage; a group that has none left disappears."""
    shares = []
    for group, advantages_G in zip(groups, advantages, strict=True):
        if len(advantages_G) != len(group.completions):
            raise RunError(
                f"prompt {group.prompt.id}: {len(group.completions)} completions but {len(advantages_G)} advantages"
            )
        values = advantages_G.tolist()
        kept = [Sample(c, a) for c, a in zip(group.completions, values, strict=True) if len(c) > 0 and not isnan(a)]
        if kept:
            shares.append(Share(group.prompt, tuple(kept)))
    return shares


def with_gradient(shares: Sequence[Share]) -> Sequence[Share]:
    """Without groups whose advantages are all 0, where a loss without KL and entropy terms has no gradient.

    All groups where none would be left: a step with a gradient of 0 is not the same as none, and is to be measured.
    """
    return [share for share in shares if any(sample.advantage != 0.0 for sample in share.samples)] or shares


def split_evenly(shares: Sequence[Share], parts: int) -> list[list[Share]]:
    """Consecutive runs of nearly equal length, one per optimizer step; empty runs are left out."""
    edges = [len(shares) * i // parts for i in range(parts + 1)]
    return [list(shares[a:b]) for a, b in pairwise(edges) if b > a]


def divide(shares: Sequence[Share], parts: int) -> list[list[Share]]:
    """Consecutive runs of completions, one per rank, of as nearly equal a number of packed tokens as can be.

    A group that lies across an edge is divided, its prompt computed in each part. Some runs may be empty.
    """
    if parts == 1:
        return [list(shares)]
    flat = [(share, sample) for share in shares for sample in share.samples]
    costs = [len(sample.completion) - 1 for _, sample in flat]
    for index, (share, _) in enumerate(flat):
        if index == 0 or flat[index - 1][0] is not share:
            costs[index] += len(share.prompt.token_ids)
    middles = [before + cost / 2 for before, cost in zip(accumulate(costs, initial=0), costs, strict=False)]
    total = sum(costs) or 1
    owners = [min(int(middle * parts / total), parts - 1) for middle in middles]
    runs = ([one for one, owner in zip(flat, owners, strict=True) if owner == part] for part in range(parts))
    return [_regrouped(run) for run in runs]


def _regrouped(flat: Sequence[tuple[Share, Sample]]) -> list[Share]:
    """Shares of these completions alone, neighbours of one group together."""
    return [
        Share(run[0][0].prompt, tuple(sample for _, sample in run))
        for run in (list(members) for _, members in groupby(flat, key=lambda one: id(one[0])))
    ]


def micro_batches(shares: Sequence[Share], budget_tokens: int) -> list[MicroBatch]:
    """Pack shares in order into micro-batches of at most `budget_tokens` packed tokens."""
    return [pack(batch) for batch in planned(shares, budget_tokens)]


def planned(shares: Sequence[Share], budget_tokens: int) -> list[list[Share]]:
    """What each of `micro_batches` holds.

    A group that does not fit is divided, its prompt computed again in each part; a single completion longer
    than the budget goes alone.
    """
    batches: list[list[Share]] = [[]]
    room = budget_tokens
    for share in shares:
        prompt_cost = len(share.prompt.token_ids)
        taken: list[Sample] = []
        for sample in share.samples:
            cost = len(sample.completion) - 1 + (0 if taken else prompt_cost)
            if cost > room and (taken or batches[-1]):
                if taken:
                    batches[-1].append(Share(share.prompt, tuple(taken)))
                batches.append([])
                taken, room = [], budget_tokens
                cost = len(sample.completion) - 1 + prompt_cost
            taken.append(sample)
            room -= cost
        batches[-1].append(Share(share.prompt, tuple(taken)))
    return [batch for batch in batches if batch]


def idle() -> MicroBatch:
    """The smallest micro-batch there is: for a rank that has nothing left to compute while others have."""
    zero = torch.zeros(1, dtype=torch.int64)
    nothing = Completion(zero, torch.zeros(1), zero, "length", "")
    return pack([Share(Prompt("idle", (0,), "", {}), (Sample(nothing, 0.0),))])


def pack(shares: Sequence[Share]) -> MicroBatch:
    """One micro-batch of these shares, on the CPU."""
    with HOST:
        layout = _Layout()
        for share in shares:
            layout.add(share)
        return layout.micro_batch()


class _Layout:
    """Collects rows and spans while shares are appended."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.owners: list[Tensor] = []
        self.spans: list[list[tuple[int, int]]] = []
        self.families = [0]
        self.scored_rows: list[Tensor] = []
        self.samples: list[Sample] = []
        self.prompt_ids: list[str] = []
        self.length = 0

    def add(self, share: Share) -> None:
        prompt = torch.tensor(share.prompt.token_ids)
        prompt_span = (self.length, len(prompt))
        self._run(prompt, 0, [prompt_span])
        last_prompt_row = self.length - 1
        for sample in share.samples:
            inputs = sample.completion.token_ids[:-1]
            first_row = self.length
            if len(inputs):
                self._run(inputs, len(prompt), [prompt_span, (first_row, len(inputs))])
            own_rows = torch.arange(first_row, first_row + len(inputs))
            self.scored_rows.append(torch.cat([torch.tensor([last_prompt_row]), own_rows]))
            self.samples.append(sample)
            self.prompt_ids.append(share.prompt.id)
        self.families.append(self.length)

    def _run(self, tokens: Tensor, first_position: int, spans: list[tuple[int, int]]) -> None:
        self.tokens.append(tokens)
        self.positions.append(torch.arange(first_position, first_position + len(tokens)))
        self.owners.append(torch.full((len(tokens),), len(self.spans)))
        self.spans.append(spans)
        self.length += len(tokens)

    def micro_batch(self) -> MicroBatch:
        positions_T = torch.cat(self.positions)
        completions = [sample.completion for sample in self.samples]
        lengths = torch.tensor([len(c) for c in completions])
        mask_BL = torch.arange(int(lengths.max()))[None] < lengths[:, None]
        sequence_S, time_S = mask_BL.nonzero(as_tuple=True)
        targets_S = torch.cat([c.token_ids for c in completions])
        engine_S = torch.cat([c.engine_logprobs for c in completions])
        place = (sequence_S, time_S)
        return MicroBatch(
            token_ids_T=torch.cat(self.tokens),
            positions_T=positions_T,
            spans=self._packed_spans(positions_T),
            longest=int(positions_T.max()) + 1,
            scored_rows_S=torch.cat(self.scored_rows),
            targets_S=targets_S,
            sequence_S=sequence_S,
            time_S=time_S,
            engine_BL=torch.zeros(mask_BL.shape).index_put(place, engine_S),
            tokens_BL=torch.zeros(mask_BL.shape, dtype=torch.int64).index_put(place, targets_S),
            mask_BL=mask_BL,
            advantages_B=torch.tensor([sample.advantage for sample in self.samples], dtype=torch.float32),
            prompt_ids=tuple(self.prompt_ids),
        )

    def _packed_spans(self, positions_T: Tensor) -> Spans:
        counts = torch.tensor([0] + [len(spans) for spans in self.spans])
        flat = torch.tensor([span for spans in self.spans for span in spans])
        return Spans(
            sequences=torch.cat(self.owners),
            visible=positions_T + 1,
            pointers=counts.cumsum(0),
            starts=flat[:, 0].contiguous(),
            lengths=flat[:, 1].contiguous(),
            families=torch.tensor(self.families),
            longest=int(positions_T.max()) + 1,
        )
