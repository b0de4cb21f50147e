"""Kernel calls that are recorded once and repeated by one call from Python, as CUDA's graphs are.

A repetition makes the very calls of the recording, on the same addresses: whoever records writes new inputs where the
old ones lay, and finds the results where they were. So nothing may happen between the calls but other kernels.
"""

from __future__ import annotations

import ctypes
import math
import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from qarl.ops.cpu import CpuKernels
from qarl.ops.kernels import kernels, using


class Memory:
    """Buffers for what recorded calls leave, handed out in order, and again after two `turn`s.

    Graphs that never run at the same time can share one.
    """

    def __init__(self) -> None:
        self._buffers: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._used = 0

    def turn(self) -> None:
        """From now on what was handed out before the last turn may be overwritten."""
        self._buffers = self._buffers[::-1]
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor in the next buffer."""
        size, buffers = math.prod(shape) * dtype.itemsize, self._buffers[0]
        if self._used == len(buffers):
            buffers.append(torch.empty(size, dtype=torch.uint8))
        elif len(buffers[self._used]) < size:  # a graph that has the smaller one keeps it
            buffers[self._used] = torch.empty(size, dtype=torch.uint8)
        self._used += 1
        return buffers[self._used - 1][:size].view(dtype).view(shape)


class Graph:
    """Recorded calls: name and arguments each, and the tensors whose addresses they hold."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.kept: list[Tensor] = []
        self._arguments = array("q")
        self._calls: list[tuple[str, int]] = []
        self._table: array[int] | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Note a call."""
        assert self._table is None, "a graph that has run is complete"
        self._calls.append((name, len(self._arguments)))
        types = getattr(self.library, name).argtypes
        self._arguments.extend(encode(kind, value) for kind, value in zip(types, arguments, strict=True))

    def run(self, nanoseconds: Tensor | None = None) -> None:
        """Make the calls again; `nanoseconds` [calls] int64 is told how long each took."""
        if self._table is None:
            base = self._arguments.buffer_info()[0]
            pairs = [(self._runner(name), base + 8 * first) for name, first in self._calls]
            self._table = array("q", [number for pair in pairs for number in pair])
        times = None if nanoseconds is None else nanoseconds.data_ptr()
        self.library.qarl_replay(self._table.buffer_info()[0], len(self._calls), times)

    def _runner(self, name: str) -> int:
        return ctypes.cast(getattr(self.library, f"run_{name}"), ctypes.c_void_p).value or 0


def encode(kind: type, value: Any) -> int:
    """An argument in 8 bytes, as a runner reads it."""
    if kind is ctypes.c_float:
        (bits,) = struct.unpack("<i", struct.pack("<f", value))
        return int(bits)
    return 0 if value is None else int(value)


class _NotingLibrary:
    """Calls functions of the library, and notes each in a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self._graph.library, name)

        def call(*arguments: Any) -> None:
            self._graph.add(name, arguments)
            function(*arguments)

        return call


class RecordingKernels(CpuKernels):
    """The C kernels, with every call noted in `graph` and results in `memory`."""

    def __init__(self, library: ctypes.CDLL, memory: Memory) -> None:
        super().__init__(library)
        self.graph = Graph(library)
        self.memory = memory
        self.library = _NotingLibrary(self.graph)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        found = self.memory.take(shape, dtype)
        self.graph.kept.append(found)
        return found


@contextmanager
def recording(memory: Memory) -> Iterator[RecordingKernels]:
    """Inside the block every kernel call happens and is noted."""
    chosen = kernels()
    assert isinstance(chosen, CpuKernels)
    recorder = RecordingKernels(chosen.library, memory)
    with using(recorder):
        yield recorder


def can_record() -> bool:
    """Whether the operations are plain calls of the C kernels, which a graph can make again."""
    return type(kernels()) is CpuKernels
