"""One more token for requests that have some: at every step the same kernel calls, so that a graph repeats them.

Shape letters: T tokens of a forward, B requests, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.models.decoder import Cache, Decoder
from qarl.ops.graph import Memory, can_record, recording
from qarl.ops.head import logits
from qarl.ops.reference import Spans
from qarl.rollout.cache import KVCache, pages_for


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a forward over an engine's cache is told of its tokens: which, where in their sequences and in the cache."""

    token_ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    spans: Spans


class Decoding:
    """Logits of a batch's newest tokens, one graph for every size of batch where the kernels can be recorded.

    For one rollout, during which weights and cache stay; its sequences have at most `longest` tokens.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, longest: int) -> None:
        self.decoder = decoder
        self.cache = cache
        self.longest = longest
        self.memory = Memory()
        self.graphs: dict[int, DecodeGraph] = {}
        self.can_record = can_record() and all(operand.is_kernels_alone for operand in decoder.operands())

    def logits(self, inputs: Inputs) -> Tensor:
        """[B, V], which the next call may overwrite; stores the tokens' keys and values."""
        if not self.can_record:
            return logits(self.decoder.head(), forward(self.decoder, self.cache, inputs))
        batch = len(inputs.token_ids_T)
        if batch not in self.graphs:
            self.graphs[batch] = DecodeGraph(self.decoder, self.cache, batch, self.longest, self.memory)
        return self.graphs[batch].logits(inputs)


class DecodeGraph:
    """The kernel calls of one decode step of `batch` requests, recorded at the first and repeated at the others."""

    def __init__(self, decoder: Decoder, cache: KVCache, batch: int, longest: int, memory: Memory) -> None:
        self.decoder = decoder
        self.memory = memory
        self.inputs = room_for(batch, longest)
        self.stores = Cache(cache.keys, cache.values, self.inputs.slots_T)
        self.hidden_BD = torch.empty(batch, decoder.config.hidden_size)
        self.logits_BV: Tensor | None = None

    def logits(self, inputs: Inputs) -> Tensor:
        """As `Decoding.logits`."""
        overwrite(self.inputs, inputs)
        torch.index_select(self.decoder.model.embed_tokens.weight, 0, inputs.token_ids_T, out=self.hidden_BD)
        if self.logits_BV is None:
            self.logits_BV = self._record()
        else:
            self.graph.run()
        return self.logits_BV

    def _record(self) -> Tensor:
        with recording(self.memory) as recorder:
            self.graph = recorder.graph
            self.memory.turn()
            last_BD, spans = self.hidden_BD, self.inputs.spans
            for output_BD in self.decoder.layers_cached(
                self.hidden_BD, self.inputs.positions_T, spans, spans.longest, self.stores
            ):
                last_BD = output_BD
                self.memory.turn()  # the next layer reads what this one gave, and nothing older
            return logits(self.decoder.head(), last_BD)


def forward(decoder: Decoder, cache: KVCache, inputs: Inputs) -> Tensor:
    """Hidden states [T, D] of these tokens, whose keys and values are stored by it."""
    stores, spans = Cache(cache.keys, cache.values, inputs.slots_T), inputs.spans
    return decoder.hidden_cached(inputs.token_ids_T, inputs.positions_T, spans, spans.longest, stores)


def room_for(batch: int, longest: int) -> Inputs:
    """Inputs to be overwritten, of `batch` sequences of at most `longest` tokens, each in pages of two regions."""
    most_spans = batch * (pages_for(longest) + 1)
    sizes = (batch, batch, batch + 1, most_spans, most_spans)
    sequences, visible, pointers, starts, lengths = (torch.empty(size, dtype=torch.int64) for size in sizes)
    spans = Spans(sequences, visible, pointers, starts, lengths, torch.tensor([0, batch]), longest)
    return Inputs(*(torch.empty(batch, dtype=torch.int64) for _ in range(3)), spans)


def overwrite(old: Inputs, new: Inputs) -> None:
    """Put these inputs where a graph reads its own; the tokens themselves are not read by kernels."""
    pairs = [(getattr(old.spans, part), getattr(new.spans, part)) for part in SPAN_PARTS]
    for room, values in [(old.positions_T, new.positions_T), (old.slots_T, new.slots_T), *pairs]:
        room[: len(values)] = values


SPAN_PARTS = ("sequences", "visible", "pointers", "starts", "lengths")
