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
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from qarl.ops.cpu import CpuKernels
from qarl.ops.kernels import kernels, using


class Memory:
    """Buffers for what kernels give back, handed out in order, and again after two `turn`s.

    The system takes back what is freed, and clearing it for its next use costs more than a small kernel; these stay.
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
    """Recorded calls: name and arguments each, and their results; whatever else they read, who records keeps."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.kept: list[Tensor] = []
        self._arguments = array("q")
        self._calls: list[tuple[str, int]] = []
        self._table: array[int] | None = None

    def add(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Note a call."""
        assert self._table is None, "a graph that has run is complete"
        self._calls.append((name, len(self._arguments)))
        types = getattr(self.library, name).argtypes
        self._arguments.extend(encode(kind, value) for kind, value in zip(types, arguments, strict=True))

    def run(self) -> None:
        """Make the calls again."""
        self._replay(None)

    def run_timed(self) -> list[int]:
        """Make the calls again; the nanoseconds of each."""
        nanoseconds = torch.empty(len(self._calls), dtype=torch.int64)
        self._replay(nanoseconds.data_ptr())
        return nanoseconds.tolist()

    def _replay(self, nanoseconds: int | None) -> None:
        if self._table is None:
            base = self._arguments.buffer_info()[0]
            pairs = [(self._runner(name), base + 8 * first) for name, first in self._calls]
            self._table = array("q", [number for pair in pairs for number in pair])
        self.library.qarl_replay(self._table.buffer_info()[0], len(self._calls), nanoseconds)

    def _runner(self, name: str) -> int:
        return ctypes.cast(getattr(self.library, f"run_{name}"), ctypes.c_void_p).value or 0


def encode(kind: type, value: Any) -> int:
    """An argument in 8 bytes, as a runner reads it."""
    if kind is ctypes.c_float:
        (bits,) = struct.unpack("=q", struct.pack("=f4x", value))
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


class KernelsInMemory(CpuKernels):
    """Kernels like `inner`, with results in `memory`."""

    def __init__(self, inner: CpuKernels, memory: Memory) -> None:
        super().__init__(inner.library)
        self.integer_level = inner.integer_level  # weights are packed for it
        self.memory = memory

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.memory.take(shape, dtype)


class RecordingKernels(KernelsInMemory):
    """The same, with every call noted in `graph`."""

    def __init__(self, inner: CpuKernels, memory: Memory) -> None:
        super().__init__(inner, memory)
        self.graph = Graph(inner.library)
        self.library = cast(ctypes.CDLL, _NotingLibrary(self.graph))

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        found = super().empty(*shape, dtype=dtype)
        self.graph.kept.append(found)
        return found


@contextmanager
def results_in(memory: Memory) -> Iterator[None]:
    """Inside the block the C kernels, where they are used, leave their results in `memory`."""
    plain = plain_kernels()
    with nullcontext() if plain is None else using(KernelsInMemory(plain, memory)):
        yield


@contextmanager
def recording(memory: Memory) -> Iterator[Graph]:
    """Inside the block the C kernels leave their results in `memory`, and every call is noted in the graph."""
    plain = plain_kernels()
    assert plain is not None, "nothing else can be recorded"
    recorder = RecordingKernels(plain, memory)
    with using(recorder):
        yield recorder.graph


def can_record() -> bool:
    """Whether the operations are plain calls of the C kernels, which a graph can make again."""
    return plain_kernels() is not None


def plain_kernels() -> CpuKernels | None:
    """The C kernels, if they are in use as they are: neither the reference nor a stand-in."""
    chosen = kernels()
    return chosen if type(chosen) is CpuKernels else None
