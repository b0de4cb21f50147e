"""Two processes that form a crew and do, both at once, what a test asks: started once, since torch takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 20.0


class Troupe:
    """So many ranks. What they are asked is a function of a test file, whose first argument is the rank's `Crew`."""

    def __init__(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_perform, args=(rank, count, port, there), daemon=True)
            process.start()
            self._ends.append(here)
            self._processes.append(process)

    def __call__(self, play: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returned; the first one's exception where one raised."""
        for end in self._ends:
            end.send((play.__module__, play.__name__, arguments))
        found = []
        for end in self._ends:
            assert end.poll(60), f"{play.__name__}: a rank does not answer"
            found.append(end.recv())
        for one in found:
            if isinstance(one, Exception):
                raise one
        return found

    def end(self) -> None:
        for end, process in zip(self._ends, self._processes, strict=True):
            end.close()
            process.join(5)
            process.kill()


@pytest.fixture(scope="session")
def pair() -> Iterator[Troupe]:
    troupe = Troupe(2)
    yield troupe
    troupe.end()


def _perform(rank: int, count: int, port: int, end: Connection) -> None:
    sys.path.insert(0, str(ROOT))
    place = {"RANK": rank, "WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in place.items()}
    import importlib

    import torch

    from qarl.cluster.crew import follow, lead

    torch.set_num_threads(1)
    crew = lead("", TIMEOUT_S) if rank == 0 else follow()[0]
    while True:
        try:
            module, name, arguments = end.recv()
        except EOFError:
            break
        torch.manual_seed(0)
        try:
            end.send(getattr(importlib.import_module(module), name)(crew, *arguments))
        except Exception as error:
            error.add_note(traceback.format_exc())
            end.send(error)
    crew.leave()
