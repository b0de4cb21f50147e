"""The decoder as an engine runs it. A decode step makes the same kernel calls as the one before: a graph repeats them.

Shape letters: T tokens of a forward, B requests, D hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qarl.models.decoder import Cache, Decoder
from qarl.ops.graph import Graph, Memory, can_record, recording, results_in
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


class Forward:
    """The decoder over an engine's cache; decode steps are graphs where the kernels can be recorded.

    For one rollout, during which weights and cache stay; its sequences have at most `longest` tokens. What is returned
    stands until the next call.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, longest: int) -> None:
        self.decoder = decoder
        self.cache = cache
        self.longest = longest
        self.memory = Memory()
        self.graphs: dict[int, DecodeGraph] = {}
        self.allows_graphs = all(operand.is_kernels_alone for operand in decoder.operands())

    def hidden(self, inputs: Inputs, memory: Memory) -> Tensor:
        """Hidden states [T, D] of these tokens, in `memory`; their keys and values are stored."""
        stores = Cache(self.cache.keys, self.cache.values, inputs.slots_T)
        with results_in(memory):
            return layers(self.decoder, self.decoder.embeddings(inputs.token_ids_T), inputs, stores, memory)

    def logits(self, inputs: Inputs) -> Tensor:
        """As `hidden`, of one token from each of B requests, and then their logits [B, V]."""
        if not self.uses_graphs():
            return logits(self.decoder.head(), self.hidden(inputs, self.memory))
        return self._graph(inputs).logits(inputs)

    def timed_logits(self, inputs: Inputs) -> tuple[Tensor, list[int]]:
        """As `logits` by a graph, with the nanoseconds of each of its kernel calls."""
        assert self.uses_graphs()
        return self._graph(inputs).timed_logits(inputs)

    def uses_graphs(self) -> bool:
        """Whether decode steps are recorded and repeated: with the C kernels, where nothing else computes."""
        return self.allows_graphs and can_record()

    def _graph(self, inputs: Inputs) -> DecodeGraph:
        batch = len(inputs.token_ids_T)
        if batch not in self.graphs:
            self.graphs[batch] = DecodeGraph(self.decoder, self.cache, batch, self.longest, self.memory)
        return self.graphs[batch]


class DecodeGraph:
    """The kernel calls of one decode step of `batch` requests, recorded at the first and repeated at the others."""

    def __init__(self, decoder: Decoder, cache: KVCache, batch: int, longest: int, memory: Memory) -> None:
        self.decoder = decoder
        self.memory = memory
        self.inputs = room_for(batch, longest)
        self.stores = Cache(cache.keys, cache.values, self.inputs.slots_T)
        self.embeddings_BD = torch.empty(batch, decoder.config.hidden_size)
        self.rotation = decoder.rotation(longest)  # kept, for the calls read its tables
        self.recorded: tuple[Graph, Tensor] | None = None

    def logits(self, inputs: Inputs) -> Tensor:
        """As `Forward.logits`."""
        self._take(inputs)
        if self.recorded is None:
            self.recorded = self._record()
        else:
            self.recorded[0].run()
        return self.recorded[1]

    def timed_logits(self, inputs: Inputs) -> tuple[Tensor, list[int]]:
        """As `Forward.timed_logits`."""
        self._take(inputs)
        if self.recorded is None:
            self.recorded = self._record()
        graph, logits_BV = self.recorded
        return logits_BV, graph.run_timed()

    def _take(self, inputs: Inputs) -> None:
        overwrite(self.inputs, inputs)
        self.embeddings_BD.copy_(self.decoder.embeddings(inputs.token_ids_T))

    def _record(self) -> tuple[Graph, Tensor]:
        with recording(self.memory) as graph:
            hidden_BD = layers(self.decoder, self.embeddings_BD, self.inputs, self.stores, self.memory)
            return graph, logits(self.decoder.head(), hidden_BD)


def layers(decoder: Decoder, x_TD: Tensor, inputs: Inputs, stores: Cache, memory: Memory) -> Tensor:
    """What the layers make of embeddings; a layer reads what the one before it left in `memory`, and nothing older."""
    memory.turn()
    for output_TD in decoder.layers_cached(x_TD, inputs.positions_T, inputs.spans, inputs.spans.longest, stores):
        x_TD = output_TD
        memory.turn()
    return x_TD


def room_for(batch: int, longest: int) -> Inputs:
    """Inputs to be overwritten, of `batch` sequences of at most `longest` tokens, each in pages of two regions."""
    most_spans = batch * (pages_for(longest) + 1)
    spans = Spans(
        sequences=empty_index(batch),
        visible=empty_index(batch),
        pointers=empty_index(batch + 1),
        starts=empty_index(most_spans),
        lengths=empty_index(most_spans),
        families=torch.tensor([0, batch]),
        longest=longest,
    )
    return Inputs(empty_index(batch), empty_index(batch), empty_index(batch), spans)


def empty_index(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.int64)


def overwrite(old: Inputs, new: Inputs) -> None:
    """Put these inputs where a graph reads its own; which tokens they are, no kernel reads."""
    for room, values in zip(read_by_kernels(old), read_by_kernels(new), strict=True):
        room[: len(values)] = values


def read_by_kernels(inputs: Inputs) -> tuple[Tensor, ...]:
    spans = inputs.spans
    layout = (spans.sequences, spans.visible, spans.pointers, spans.starts, spans.lengths)
    return (inputs.positions_T, inputs.slots_T, *layout)
